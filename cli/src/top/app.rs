//! Holds the state of the `top` screen and handles keys. Decides which bulkheads are shown, in which order, and which
//! one is selected. `draw` renders the state, and `sample` requests the data. This module does not access the terminal,
//! sockets or the clock.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{Event as Input, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::events::Events;
use super::sample::{Bulkhead, Counts, Sample, rates};
use super::text::clean;
use crate::output::{Failure, exit};

/// Maximum length of a filter, in characters.
const FILTER_CHARS_MAX: usize = 64;

/// Time without a sample after which the screen shows that the supervisor is not responding.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// Action to take after a key press.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Stay,
    /// Exits with the given status.
    Leave(u8),
    /// Suspends the program, as ^Z does.
    Suspend,
}

/// The displayed page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Page {
    List,
    /// The page of a single bulkhead. `scroll` is the number of workers that have been scrolled off the top.
    Bulkhead {
        name: String,
        scroll: usize,
    },
}

/// Input mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Browse,
    /// The user is typing a filter. `before` is the previous filter, which is restored if the user cancels.
    Filter {
        before: String,
    },
    Help,
}

/// Sort order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// Bulkheads with the worst state and service level come first.
    Worst,
    Name,
    Utilisation,
    Rejections,
    Crashes,
}

impl Sort {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Worst => "worst",
            Self::Name => "name",
            Self::Utilisation => "utilisation",
            Self::Rejections => "rejections",
            Self::Crashes => "crashes",
        }
    }

    fn next(self) -> Self {
        match self {
            Self::Name => Self::Utilisation,
            Self::Utilisation => Self::Rejections,
            Self::Rejections => Self::Crashes,
            Self::Crashes => Self::Worst,
            Self::Worst => Self::Name,
        }
    }

    fn compare(self, a: &Bulkhead, b: &Bulkhead) -> Ordering {
        // Compares current rates first, then totals.
        let by = |rate: fn(&Counts<f64>) -> f64, count: fn(&Counts<u64>) -> u64| {
            let now = |of: &Bulkhead| of.rates.as_ref().map_or(0.0, rate);
            now(b).total_cmp(&now(a)).then_with(|| count(&b.counts).cmp(&count(&a.counts)))
        };
        let order = match self {
            Self::Worst => b.rank.cmp(&a.rank),
            Self::Name => Ordering::Equal,
            Self::Utilisation => b.utilisation().total_cmp(&a.utilisation()),
            Self::Rejections => by(|rates| rates.rejected, |counts| counts.rejected),
            Self::Crashes => by(|rates| rates.crashed, |counts| counts.crashed),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }
}

/// State of the connection to the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionState {
    Live,
    Paused,
    /// The supervisor has not responded for the given time.
    Silent(Duration),
    /// The supervisor has been unreachable for the given time.
    Lost(Duration),
}

/// State of the screen.
#[derive(Debug)]
pub(super) struct App {
    pub(super) page: Page,
    pub(super) mode: Mode,
    pub(super) sort: Sort,
    pub(super) filter: String,
    pub(super) events: Events,
    /// Index of the first displayed row. Adjusted when the screen is drawn, so that the selected row stays visible.
    pub(super) top: usize,
    /// Number of rows per page the last time the screen was drawn.
    pub(super) page_rows: usize,
    pub(super) interval: Duration,
    pub(super) socket: String,
    bulkheads: Vec<Bulkhead>,
    selected: Selection,
    /// Time when the last sample was taken or the last pause ended, whichever is later.
    last_contact: Instant,
    /// Error from the last attempt to take a sample.
    error: Option<String>,
    is_paused: bool,
    sampled_at: Instant,
}

/// The selected row. The selection follows the named bulkhead, or stays at the same index if that bulkhead is no
/// longer displayed.
#[derive(Debug, Default)]
struct Selection {
    name: Option<String>,
    index: usize,
}

impl App {
    pub(super) fn new(first: Sample, interval: Duration, socket: String) -> Self {
        let mut events = Events::default();
        events.add(first.events);
        Self {
            page: Page::List,
            mode: Mode::Browse,
            sort: Sort::Worst,
            filter: String::new(),
            events,
            top: 0,
            page_rows: 1,
            interval,
            socket: clean(&socket),
            bulkheads: first.bulkheads,
            selected: Selection::default(),
            last_contact: first.at,
            error: None,
            is_paused: false,
            sampled_at: first.at,
        }
    }

    // Samples.

    /// Stores a sample, or the error if taking the sample failed.
    pub(super) fn store(&mut self, result: Result<Sample, Failure>) -> Step {
        match result {
            Ok(sample) => self.store_sample(sample),
            Err(failure) => self.error = Some(clean(failure.message())),
        }
        Step::Stay
    }

    fn store_sample(&mut self, mut sample: Sample) {
        let elapsed = sample.at.saturating_duration_since(self.sampled_at);
        if !sample.was_restarted {
            let before: HashMap<&str, Counts<u64>> =
                self.bulkheads.iter().map(|before| (before.name.as_str(), before.counts)).collect();
            for now in &mut sample.bulkheads {
                let before = before.get(now.name.as_str());
                now.rates = before.and_then(|before| rates(before, &now.counts, elapsed));
            }
        }
        self.bulkheads = sample.bulkheads;
        self.events.add(sample.events);
        (self.sampled_at, self.last_contact, self.error) = (sample.at, sample.at, None);
    }

    pub(super) fn connection_state(&self, now: Instant) -> ConnectionState {
        let silence = now.saturating_duration_since(self.last_contact);
        match (&self.error, self.is_paused) {
            (Some(_), _) => ConnectionState::Lost(now.saturating_duration_since(self.sampled_at)),
            (None, true) => ConnectionState::Paused,
            (None, false) if silence > self.interval + SILENT_AFTER => ConnectionState::Silent(silence),
            (None, false) => ConnectionState::Live,
        }
    }

    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused
    }

    pub(super) fn bulkheads(&self) -> &[Bulkhead] {
        &self.bulkheads
    }

    pub(super) fn bulkhead(&self, name: &str) -> Option<&Bulkhead> {
        self.bulkheads.iter().find(|bulkhead| bulkhead.name == name)
    }

    /// Returns the bulkheads that match the filter, in sort order.
    pub(super) fn rows(&self) -> Vec<&Bulkhead> {
        let filter = self.filter.to_lowercase();
        let is_shown = |bulkhead: &&Bulkhead| bulkhead.name.to_lowercase().contains(&filter);
        let mut rows: Vec<&Bulkhead> = self.bulkheads.iter().filter(is_shown).collect();
        rows.sort_by(|a, b| self.sort.compare(a, b));
        rows
    }

    /// Returns the index of the selected row.
    pub(super) fn selected(&self, rows: &[&Bulkhead]) -> usize {
        let named = self.selected.name.as_ref();
        let found = named.and_then(|name| rows.iter().position(|row| row.name == *name));
        found.unwrap_or(self.selected.index).min(rows.len().saturating_sub(1))
    }

    // Keys.

    pub(super) fn press(&mut self, input: Input, now: Instant) -> Step {
        let Input::Key(key) = input else { return Step::Stay };
        if key.kind == KeyEventKind::Release {
            return Step::Stay;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => return Step::Leave(exit::CANCELLED),
                KeyCode::Char('z') => return Step::Suspend,
                _ => {}
            }
        }
        match self.mode {
            Mode::Help => self.mode = Mode::Browse,
            Mode::Filter { .. } => self.type_filter(key),
            Mode::Browse => return self.browse(key.code, now),
        }
        Step::Stay
    }

    fn type_filter(&mut self, key: KeyEvent) {
        let is_control = key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT);
        match key.code {
            KeyCode::Enter => self.mode = Mode::Browse,
            KeyCode::Esc => {
                if let Mode::Filter { before } = std::mem::replace(&mut self.mode, Mode::Browse) {
                    self.filter = before;
                }
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char('u') if is_control => self.filter.clear(),
            KeyCode::Char(c) if !is_control && self.filter.chars().count() < FILTER_CHARS_MAX => {
                self.filter.push_str(&clean(c.encode_utf8(&mut [0; 4])));
            }
            _ => {}
        }
    }

    fn browse(&mut self, key: KeyCode, now: Instant) -> Step {
        match key {
            KeyCode::Char('q') => return Step::Leave(exit::OK),
            KeyCode::Esc => return self.back(),
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            KeyCode::Char('p') => self.pause(now),
            KeyCode::Enter => self.open(),
            KeyCode::Backspace | KeyCode::Left => self.page = Page::List,
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1),
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1),
            KeyCode::PageDown => self.move_by(step(self.page_rows)),
            KeyCode::PageUp => self.move_by(-step(self.page_rows)),
            KeyCode::Home => self.move_by(isize::MIN),
            KeyCode::End => self.move_by(isize::MAX),
            KeyCode::Char(c) if self.page == Page::List => self.change_sort(c),
            _ => {}
        }
        Step::Stay
    }

    fn change_sort(&mut self, key: char) {
        match key {
            '/' => self.mode = Mode::Filter { before: self.filter.clone() },
            's' => self.sort = self.sort.next(),
            'w' => self.sort = Sort::Worst,
            'n' => self.sort = Sort::Name,
            'u' => self.sort = Sort::Utilisation,
            'r' => self.sort = Sort::Rejections,
            'c' => self.sort = Sort::Crashes,
            _ => {}
        }
    }

    fn back(&mut self) -> Step {
        if self.page != Page::List {
            self.page = Page::List;
        } else if !self.filter.is_empty() {
            self.filter.clear();
        } else {
            return Step::Leave(exit::OK);
        }
        Step::Stay
    }

    fn pause(&mut self, now: Instant) {
        self.is_paused = !self.is_paused;
        self.last_contact = now;
    }

    fn open(&mut self) {
        let rows = self.rows();
        if let (Page::List, Some(row)) = (&self.page, rows.get(self.selected(&rows))) {
            self.page = Page::Bulkhead { name: row.name.clone(), scroll: 0 };
        }
    }

    fn move_by(&mut self, by: isize) {
        if let Page::Bulkhead { scroll, .. } = &mut self.page {
            // The value is limited to the last row when the page is drawn.
            *scroll = scroll.saturating_add_signed(by);
            return;
        }
        let rows = self.rows();
        let index = self.selected(&rows).saturating_add_signed(by).min(rows.len().saturating_sub(1));
        let name = rows.get(index).map(|row| row.name.clone());
        self.selected = Selection { name, index };
    }
}

fn step(rows: usize) -> isize {
    isize::try_from(rows.max(1)).unwrap_or(isize::MAX)
}

/// Returns the index of the first row to display, scrolling as little as possible to keep the selected row visible.
pub(super) fn window(top: usize, selected: usize, page: usize, rows: usize) -> usize {
    let first = (selected + 1).saturating_sub(page);
    top.clamp(first, selected.max(first)).min(rows.saturating_sub(page))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    pub(in super::super) fn sample(at: Instant, bulkheads: &[serde_json::Value]) -> Sample {
        let bulkheads = bulkheads.iter().map(super::super::sample::tests::bulkhead).collect();
        Sample { at, bulkheads, events: Vec::new(), was_restarted: false }
    }

    fn bulkhead(name: &str, in_flight: u64, rejected: u64, crashed: u64) -> serde_json::Value {
        let rejected = json!({"queue_full": rejected});
        json!({"name": name, "limit": 10, "in_flight": in_flight, "rejected": rejected, "crashed": crashed})
    }

    fn app(start: Instant) -> App {
        let all = [bulkhead("a", 1, 0, 5), bulkhead("b", 9, 3, 0), bulkhead("c", 5, 7, 0)];
        App::new(sample(start, &all), Duration::from_secs(1), "admin.sock".into())
    }

    pub(in super::super) fn press(app: &mut App, code: KeyCode) -> Step {
        app.press(Input::Key(code.into()), Instant::now())
    }

    fn types(app: &mut App, text: &str) {
        text.chars().for_each(|c| assert_eq!(press(app, KeyCode::Char(c)), Step::Stay));
    }

    fn names(app: &App) -> String {
        app.rows().iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(" ")
    }

    fn selected(app: &App) -> String {
        let rows = app.rows();
        rows[app.selected(&rows)].name.clone()
    }

    #[test]
    fn keys_sort_and_filter_rows() {
        let mut app = app(Instant::now());
        assert_eq!(names(&app), "a b c");
        for (key, order) in [('u', "b c a"), ('r', "c b a"), ('c', "a b c"), ('n', "a b c"), ('s', "b c a")] {
            types(&mut app, &key.to_string());
            assert_eq!(names(&app), order, "{key}");
        }
        types(&mut app, "/B");
        assert_eq!(names(&app), "b", "the filter applies while it is being typed");
        press(&mut app, KeyCode::Enter);
        assert_eq!((names(&app), &app.mode), ("b".to_owned(), &Mode::Browse));
        types(&mut app, "/xyz");
        assert_eq!((names(&app), app.selected(&[])), (String::new(), 0));
        press(&mut app, KeyCode::Esc);
        assert_eq!(app.filter, "B", "Escape restores the previous filter");
        assert_eq!(press(&mut app, KeyCode::Esc), Step::Stay);
        assert_eq!(names(&app), "b c a", "a second Escape clears the filter");
        types(&mut app, &format!("/{}\u{1b}\u{7}", "x".repeat(100)));
        assert_eq!(app.filter.len(), FILTER_CHARS_MAX);
    }

    #[test]
    fn default_order_lists_worst_bulkhead_first() {
        let mut all = ["a", "b", "c", "d"].map(|name| bulkhead(name, 0, 0, 0));
        for (index, state, service) in
            [(1, "ready", "failing"), (2, "failed", "ok"), (3, "ready", "degraded")]
        {
            (all[index]["state"], all[index]["service"]) = (json!(state), json!(service));
        }
        let mut app = App::new(sample(Instant::now(), &all), Duration::from_secs(1), String::new());
        assert_eq!(names(&app), "b c d a");
        types(&mut app, "n");
        assert_eq!(names(&app), "a b c d");
        types(&mut app, "w");
        assert_eq!(names(&app), "b c d a");
    }

    #[test]
    fn sort_by_rejections_uses_current_rates() {
        let start = Instant::now();
        let mut app = app(start);
        types(&mut app, "r");
        let later = start + Duration::from_secs(1);
        app.store(Ok(sample(
            later,
            &[bulkhead("a", 1, 1, 5), bulkhead("b", 9, 3, 0), bulkhead("c", 5, 7, 0)],
        )));
        assert_eq!(names(&app), "a c b");
    }

    #[test]
    fn selection_follows_bulkhead_when_rows_move() {
        let start = Instant::now();
        let mut app = app(start);
        assert_eq!(selected(&app), "a");
        press(&mut app, KeyCode::Down);
        assert_eq!(selected(&app), "b");
        types(&mut app, "u");
        assert_eq!((selected(&app), app.selected(&app.rows())), ("b".to_owned(), 0));
        press(&mut app, KeyCode::End);
        assert_eq!(selected(&app), "a");
        for key in [KeyCode::Down, KeyCode::PageDown, KeyCode::End] {
            press(&mut app, key);
            assert_eq!(selected(&app), "a", "the last row stays selected");
        }
        app.store(Ok(sample(start, &[bulkhead("b", 0, 0, 0)])));
        assert_eq!(selected(&app), "b", "the selected bulkhead is gone, so the last row is selected");
        app.store(Ok(sample(start, &[])));
        for key in [KeyCode::Up, KeyCode::Home, KeyCode::Enter] {
            press(&mut app, key);
        }
        assert_eq!(app.page, Page::List, "an empty list has no page to open");
    }

    #[test]
    fn keys_open_and_close_pages() {
        let mut app = app(Instant::now());
        press(&mut app, KeyCode::Char('j'));
        press(&mut app, KeyCode::Enter);
        assert_eq!(app.page, Page::Bulkhead { name: "b".into(), scroll: 0 });
        press(&mut app, KeyCode::Down);
        assert_eq!(app.page, Page::Bulkhead { name: "b".into(), scroll: 1 });
        types(&mut app, "/?");
        assert_eq!(app.mode, Mode::Help, "`/` has no effect on a page");
        assert_eq!(press(&mut app, KeyCode::Char('q')), Step::Stay, "any key closes the help");
        assert_eq!(press(&mut app, KeyCode::Esc), Step::Stay);
        assert_eq!(app.page, Page::List);
        assert_eq!(press(&mut app, KeyCode::Esc), Step::Leave(0));
        assert_eq!(press(&mut app, KeyCode::Char('q')), Step::Leave(0));
        let control = |c| Input::Key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
        types(&mut app, "/");
        assert_eq!(app.press(control('c'), Instant::now()), Step::Leave(130));
        assert_eq!(app.press(control('z'), Instant::now()), Step::Suspend);
        assert_eq!(app.press(Input::Resize(1, 1), Instant::now()), Step::Stay);
    }

    #[test]
    fn rates_are_computed_between_two_samples() {
        let start = Instant::now();
        let mut app = app(start);
        let rejected =
            |app: &App| app.bulkhead("a").and_then(|a| a.rates.as_ref()).map(|rates| rates.rejected);
        assert_eq!(rejected(&app), None);
        let mut sampled_rate = |seconds: u64, rejected, was_restarted| {
            let at = start + Duration::from_secs(seconds);
            let sample = sample(at, &[bulkhead("a", 0, rejected, 9), bulkhead("new", 0, 1, 1)]);
            app.store(Ok(Sample { was_restarted, ..sample }));
            app.bulkhead("a").and_then(|a| a.rates.as_ref()).map(|rates| rates.rejected)
        };
        assert_eq!(sampled_rate(2, 10, false), Some(5.0));
        assert_eq!(sampled_rate(3, 10, false), Some(0.0));
        assert_eq!(sampled_rate(4, 3, false), None, "lower counters mean a restart");
        assert_eq!(sampled_rate(5, 4, false), Some(1.0));
        assert_eq!(sampled_rate(6, 9, true), None, "another event log means a restart");
        assert_eq!(sampled_rate(6, 9, false), None, "no time has passed between the samples");
    }

    #[test]
    fn connection_state_distinguishes_silence_loss_and_pause() {
        let start = Instant::now();
        let mut app = app(start);
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(app.connection_state(start), ConnectionState::Live);
        assert_eq!(app.connection_state(after(4)), ConnectionState::Live);
        assert_eq!(app.connection_state(after(5)), ConnectionState::Silent(Duration::from_secs(5)));
        app.press(Input::Key(KeyCode::Char('p').into()), after(5));
        assert!(app.is_paused());
        assert_eq!(app.connection_state(after(60)), ConnectionState::Paused);
        app.press(Input::Key(KeyCode::Char('p').into()), after(60));
        assert_eq!(
            app.connection_state(after(61)),
            ConnectionState::Live,
            "the supervisor was not polled during the pause"
        );
        app.store(Err(Failure::new(69, "gone\u{1b}[2J")));
        assert_eq!(app.connection_state(after(70)), ConnectionState::Lost(Duration::from_secs(70)));
        assert_eq!(app.error(), Some("gone\\u{1b}[2J"));
        assert_eq!(names(&app), "a b c", "the last sample stays visible");
        app.store(Ok(sample(after(71), &[bulkhead("a", 0, 0, 0)])));
        assert_eq!((app.connection_state(after(71)), names(&app)), (ConnectionState::Live, "a".to_owned()));
    }

    #[test]
    fn visible_window_contains_selected_row() {
        for rows in 0..12 {
            for page in 0..12 {
                let mut top = 0;
                for selected in (0..rows).chain((0..rows).rev()) {
                    top = window(top, selected, page, rows);
                    assert!(
                        page == 0 || (top..top + page).contains(&selected),
                        "{top} {selected} {page} {rows}"
                    );
                    assert!(top + page <= rows.max(page));
                }
            }
        }
        assert_eq!(window(9, 0, 5, 0), 0);
    }
}
