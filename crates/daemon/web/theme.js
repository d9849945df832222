// The theme that was chosen here. Runs before the first paint, so that the page does not flash in the other one.
(() => {
  const chosen = localStorage.getItem("freestone-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
