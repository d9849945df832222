//! `freestone top`: what volumes do, as it happens.

use super::{DaemonArgs, Session};
use crate::error::Error;
use api::{Array, Job, Sample, Samples};
use base::Size;
use hosting::text::grouped;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Gauge, Row, Table};
use ratatui::{DefaultTerminal, Frame};
use std::time::Duration;

/// Interval between two samples.
const LOOK: Duration = Duration::from_secs(1);

/// The arguments of `freestone top`.
#[derive(clap::Args, Debug)]
pub struct TopArgs {
    /// Print N samples as lines, then exit
    #[arg(long, value_name = "N")]
    count: Option<u32>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Rates of a volume, per second.
#[derive(Clone, Debug, PartialEq)]
struct Rates {
    name: String,
    reads: f64,
    writes: f64,
    read_bytes: f64,
    written_bytes: f64,
    /// Mean, in microseconds.
    read_us: f64,
    write_us: f64,
    /// Part of the requests' time that was waiting for limits: 0 to 1.
    limited: f64,
    in_flight: u64,
}

/// The difference of two samples, the busiest volume first.
fn rates(before: &Samples, after: &Samples) -> Vec<Rates> {
    let seconds = after.at_ns.saturating_sub(before.at_ns).max(1) as f64 / 1e9;
    let of = |(name, now): (&String, &Sample)| {
        let then = before.volumes.get(name).copied().unwrap_or_default();
        let more = |now: u64, then: u64| now.saturating_sub(then) as f64;
        let read_ns = more(now.read_sum_ns, then.read_sum_ns);
        let write_ns = more(now.write_sum_ns, then.write_sum_ns);
        let mean_us = |ns: f64, count: f64| if count > 0.0 { ns / count / 1e3 } else { 0.0 };
        let (reads, writes) = (more(now.reads, then.reads), more(now.writes, then.writes));
        Rates {
            name: name.clone(),
            reads: reads / seconds,
            writes: writes / seconds,
            read_bytes: more(now.read_bytes, then.read_bytes) / seconds,
            written_bytes: more(now.written_bytes, then.written_bytes) / seconds,
            read_us: mean_us(read_ns, more(now.reads_timed, then.reads_timed)),
            write_us: mean_us(write_ns, more(now.writes_timed, then.writes_timed)),
            // A wait counts when it ends, the time of the request when that ends.
            limited: (more(now.throttled_ns, then.throttled_ns) / (read_ns + write_ns).max(1.0)).min(1.0),
            in_flight: now.in_flight,
        }
    };
    let mut rates: Vec<Rates> = after.volumes.iter().map(of).collect();
    rates.sort_by(|one, other| (other.reads + other.writes).total_cmp(&(one.reads + one.writes)));
    rates
}

impl Rates {
    fn cells(&self) -> [String; COLUMNS] {
        let rate = |bytes: f64| format!("{}/s", Size(bytes.round() as u64));
        let count = |count: f64| grouped(count.round() as u64);
        let us = |us: f64| format!("{us:.0}");
        [
            self.name.clone(),
            count(self.reads),
            count(self.writes),
            rate(self.read_bytes),
            rate(self.written_bytes),
            us(self.read_us),
            us(self.write_us),
            format!("{:.0} %", self.limited * 100.0),
            self.in_flight.to_string(),
        ]
    }
}

const COLUMNS: usize = 9;
const HEADING: [&str; COLUMNS] =
    ["VOLUME", "READS/S", "WRITES/S", "READ", "WRITTEN", "READ µs", "WRITE µs", "LIMITED", "IN FLIGHT"];

/// Content of the screen.
struct View {
    rates: Vec<Rates>,
    arrays: Vec<Array>,
    jobs: Vec<Job>,
}

impl TopArgs {
    /// Shows rates until `q` is pressed.
    ///
    /// # Errors
    /// When the daemon does not answer, or the terminal cannot be used.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let mut before: Samples = session.client.get(&["samples"])?;
        if let Some(count) = self.count {
            for _ in 0..count {
                std::thread::sleep(LOOK);
                let after: Samples = session.client.get(&["samples"])?;
                let rows: Vec<[String; COLUMNS]> = rates(&before, &after).iter().map(Rates::cells).collect();
                println!("{}", super::table::table(HEADING, &rows));
                before = after;
            }
            return Ok(());
        }
        let mut terminal = ratatui::try_init().map_err(failed)?;
        let shown = show(&session, &mut terminal, before);
        ratatui::restore();
        shown
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::Runtime(format!("terminal: {error}"))
}

fn show(session: &Session, terminal: &mut DefaultTerminal, mut before: Samples) -> Result<(), Error> {
    let mut view = View { rates: Vec::new(), arrays: Vec::new(), jobs: Vec::new() };
    loop {
        view.arrays = session.client.get(&["arrays"])?;
        view.jobs = session.client.get(&["jobs"])?;
        terminal.draw(|frame| draw(frame, &view)).map_err(failed)?;
        if event::poll(LOOK).map_err(failed)?
            && let Event::Key(key) = event::read().map_err(failed)?
            && key.kind == KeyEventKind::Press
            && matches!(key.code, KeyCode::Char('q' | 'c') | KeyCode::Esc)
        {
            return Ok(());
        }
        let after: Samples = session.client.get(&["samples"])?;
        view.rates = rates(&before, &after);
        before = after;
    }
}

fn draw(frame: &mut Frame<'_>, view: &View) {
    let arrays = view.arrays.len().max(1) as u16;
    let heights =
        [Constraint::Length(arrays), Constraint::Length(view.jobs.len() as u16), Constraint::Min(2)];
    let [top, middle, bottom] = Layout::vertical(heights).areas(frame.area());
    let line = |array: &Array| {
        let text = format!(
            "array {}: {}, {} of {} members live",
            array.name,
            array.state.name(),
            array.live_members(),
            array.members.len()
        );
        let is_well = array.state == api::ArrayState::Optimal;
        Line::styled(text, if is_well { Style::new() } else { Style::new().add_modifier(Modifier::BOLD) })
    };
    let lines: Vec<Line<'_>> = match &view.arrays[..] {
        [] => vec![Line::raw("no arrays")],
        arrays => arrays.iter().map(line).collect(),
    };
    frame.render_widget(ratatui::widgets::Paragraph::new(lines), top);
    let rows = Layout::vertical(vec![Constraint::Length(1); view.jobs.len()]).split(middle);
    for (job, area) in view.jobs.iter().zip(rows.iter()) {
        let ratio = (job.done_bytes as f64 / job.total_bytes.max(1) as f64).clamp(0.0, 1.0);
        let left = job.eta_s.map(|seconds| format!(", {seconds} s left")).unwrap_or_default();
        let label = format!("{} {:.0} %{left}", job.id, ratio * 100.0);
        frame.render_widget(Gauge::default().ratio(ratio).label(label), *area);
    }
    let widths = [Constraint::Min(12)].into_iter().chain([Constraint::Length(12); COLUMNS - 1]);
    let rows = view.rates.iter().map(|rates| Row::new(rates.cells()));
    let heading = Row::new(HEADING).style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_widget(Table::new(rows, widths).header(heading), bottom);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_and_the_busiest_comes_first() {
        let sample = |reads, read_sum_ns| Sample {
            reads,
            reads_timed: reads,
            read_sum_ns,
            read_bytes: reads * 4096,
            ..Sample::default()
        };
        let at = |at_ns, a, b| Samples {
            at_ns,
            volumes: [("a".into(), a), ("b".into(), b)].into(),
            ..Samples::default()
        };
        let before = at(0, sample(10, 0), sample(0, 0));
        let limited = Sample { throttled_requests: 4, throttled_ns: 1_750_000, ..sample(100, 5_000_000) };
        let after = at(2_000_000_000, sample(20, 0), limited);
        let rates = rates(&before, &after);
        let names: Vec<&str> = rates.iter().map(|rates| rates.name.as_str()).collect();
        assert_eq!(names, ["b", "a"]);
        assert_eq!(rates[0].cells(), ["b", "50", "0", "200 KiB/s", "0 B/s", "50", "0", "35 %", "0"]);
        assert_eq!(rates[1].cells()[7], "0 %", "a volume without requests waits for no limits");
    }

    #[test]
    fn a_view_fits_any_terminal() {
        let view = View { rates: Vec::new(), arrays: Vec::new(), jobs: Vec::new() };
        for (width, height) in [(80, 24), (1, 1), (300, 2)] {
            let backend = ratatui::backend::TestBackend::new(width, height);
            let mut terminal = ratatui::Terminal::new(backend).unwrap();
            terminal.draw(|frame| draw(frame, &view)).unwrap();
        }
    }
}
