// Texts with a button that copies them: paths, addresses, NQNs, commands.

import { h, hidden, setText } from "./dom.js";

const SHOWN_MS = 3_000;

/** Copy the text of an element. Without a secure context the page has no clipboard: it selects the text. */
export async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return { word: "Copied", report: "Copied." };
  } catch {
    getSelection().selectAllChildren(code);
    return { word: "Ctrl+C", report: "Selected: copy it with Ctrl+C." };
  }
}

/** A button that copies the text of `code`, whose name is `of`. It reports the result itself: nothing around it moves. */
function copyButton(code, of) {
  const word = h("span", null, "Copy");
  const said = h("span", { role: "status", class: "visually-hidden" });
  const onclick = async () => {
    const result = await copy(code);
    setText(word, result.word);
    setText(said, result.report);
    setTimeout(() => {
      setText(word, "Copy");
      setText(said, "");
    }, SHOWN_MS);
  };
  return [h("button", { type: "button", class: "copy", onclick }, word, hidden(` ${of}`)), said];
}

/** A text in a line that does not break, and its button. */
export function copyable(text) {
  const code = h("code", null, text);
  return h("span", { class: "copyable" }, code, " ", copyButton(code, text));
}

/** A command in a box, and its button; `of` names the command. */
export function copyableCommand(text, of) {
  const code = h("code", null, text);
  return [h("pre", { tabindex: 0, "aria-label": `Command ${of}`, role: "region" }, code), h("div", { class: "buttons" }, copyButton(code, `the command ${of}`))];
}
