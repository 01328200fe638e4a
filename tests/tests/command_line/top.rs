//! `bulkhead top` in a shell on a terminal, with a real supervisor. A terminal emulator interprets the
//! output.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use bulkhead_tests::{Supervisor, children, kill_pid, name, not_run, programs, wait_for};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::Signal;
use rustix::termios::tcsetwinsize;
use serde_json::Value;

/// Terminal that runs a shell. Dropping this value kills the shell and its children.
struct Terminal {
    master: File,
    shell: Child,
    seen: Arc<Mutex<Seen>>,
}

/// Bytes sent to the terminal, and the screen after processing the bytes.
struct Seen {
    bytes: Vec<u8>,
    parser: vt100::Parser,
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn lines(count: u16) -> NonZero<u16> {
    NonZero::new(count).expect("a terminal has a size")
}

impl Terminal {
    /// Runs a script in a terminal with 24 lines. Returns `None` and prints the reason if `setsid`, which assigns a
    /// terminal to a session, is not installed.
    fn run(supervisor: &Supervisor, script: &str, variables: &[(&str, &str)]) -> Option<Self> {
        if Command::new("setsid").arg("--version").stdout(Stdio::null()).status().is_err() {
            not_run!("setsid, which gives the test a terminal, is not installed");
            return None;
        }
        let pair = openpty(&size(24, 80), None).expect("a pseudoterminal");
        let end = || Stdio::from(pair.slave.try_clone().expect("a descriptor"));
        let shell = Command::new("setsid")
            .args(["--ctty", "sh", "-c", script])
            .env("TOP", programs().join("bulkhead"))
            .env("BULKHEAD_SOCKET", supervisor.socket())
            .env("TERM", "xterm-256color")
            .env_remove("BULKHEAD_ADMIN")
            .env_remove("NO_COLOR")
            .envs(variables.iter().copied())
            .current_dir(supervisor.folder.path())
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("setsid runs");
        let master = File::from(pair.master);
        let seen = Seen { bytes: Vec::new(), parser: vt100::Parser::new(lines(24), lines(80), 0) };
        let seen = Arc::new(Mutex::new(seen));
        let (mut reader, sink) = (master.try_clone().expect("a descriptor"), seen.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The read fails after the last process has closed the other end.
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                let mut seen = sink.lock().expect("no thread panics while it holds the lock");
                seen.bytes.extend_from_slice(&buffer[..count]);
                seen.parser.process(&buffer[..count]);
            }
        });
        Some(Self { master, shell, seen })
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("the terminal accepts key presses");
    }

    fn resize(&self, rows: u16, columns: u16) {
        self.seen.lock().expect("no panic").parser.screen_mut().set_size(lines(rows), lines(columns));
        let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).expect("a terminal");
    }

    fn ask<T>(&self, question: impl FnOnce(&Seen) -> T) -> T {
        question(&self.seen.lock().expect("no panic"))
    }

    fn text(&self) -> String {
        self.ask(|seen| seen.parser.screen().contents())
    }

    /// Waits until the screen shows `what`. Returns the screen.
    #[track_caller]
    fn shows(&self, what: &str) -> String {
        self.shows_as(what, |text| text.contains(what))
    }

    /// Waits until the screen shows all parts at the same time, because the screen is redrawn line by line.
    #[track_caller]
    fn shows_all(&self, parts: &[&str]) -> String {
        self.shows_as(&parts.join(", "), |text| parts.iter().all(|part| text.contains(part)))
    }

    #[track_caller]
    fn shows_as(&self, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        let began = std::time::Instant::now();
        loop {
            let text = self.text();
            if is_it(&text) {
                return text;
            }
            assert!(began.elapsed() < bulkhead_tests::PATIENCE, "the screen does not show {what}:\n{text}");
            std::thread::park_timeout(std::time::Duration::from_millis(5));
        }
    }

    /// Returns the PID of the `bulkhead` process that the shell has started.
    fn top(&self) -> u32 {
        wait_for("bulkhead runs", || {
            children(self.shell.id()).into_iter().find(|&pid| name(pid).is_some_and(|n| n == "bulkhead"))
        })
    }

    /// Waits for the message that the shell prints after `top` has exited, and checks that the terminal is restored.
    #[track_caller]
    fn is_restored(&self, said: &str) {
        self.shows(said);
        self.ask(|seen| {
            let screen = seen.parser.screen();
            assert!(!screen.alternate_screen() && !screen.hide_cursor(), "{}", screen.contents());
        });
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The processes may have exited already.
        children(self.shell.id()).into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// Shell script that runs `top` and checks that the terminal modes are the same afterwards.
const SCRIPT: &str = r#"before=$(stty -g); "$TOP" top --interval 100ms; echo "left with $?"
    [ "$before" = "$(stty -g)" ] && echo "as it was""#;

const WORKERS: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 7\n\
                       [bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n";

fn submit(supervisor: &Supervisor, arguments: &[&str]) {
    bulkhead_tests::output(supervisor.command().arg("submit").args(arguments));
}

/// Returns the words in the table row of a bulkhead.
fn row(text: &str, name: &str) -> Option<Vec<String>> {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    text.lines().map(words).find(|words| words.first().is_some_and(|first| first == name))
}

#[test]
fn top_shows_crashes_and_escapes_tenant_names() {
    let supervisor = Supervisor::start(WORKERS);
    let Some(mut terminal) = Terminal::run(&supervisor, SCRIPT, &[]) else { return };
    let text = terminal.shows_as("both bulkheads", |text| {
        let parts = ["NAME", "CRASH/s", "EVENTS", "? help"];
        let has_row = |name: &&str| row(text, name).is_some_and(|row| row.len() > 1);
        parts.iter().all(|part| text.contains(part)) && ["b", "broken"].iter().all(has_row)
    });
    let state = |name: &str| row(&text, name).unwrap()[1].clone();
    assert_eq!((state("b").as_str(), state("broken").as_str()), ("ready", "failed"), "{text}");

    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{202e}\u{9b}31mevil";
    submit(&supervisor, &["b", "abort", "--tenant", evil]);
    terminal.shows("job_crashed");
    // The numbers come from a later request than the events do.
    terminal.press("c");
    terminal.shows("sort: crashes");
    terminal.press("/");
    terminal.press("b\r");
    terminal.shows("filter: b");
    terminal.press("\u{1b}[H\r");
    terminal.shows_all(&["PID", "LAST-EXIT", "killed by SIGABRT", "crashed 1", "TENANT", r"\u{1b}]0;owned"]);
    terminal.ask(|seen| {
        let told = String::from_utf8_lossy(&seen.bytes);
        for steering in ["\u{1b}]", "\u{7}", "\u{9b}", "\u{202e}", "\u{1b}[2J\u{202e}"] {
            assert!(!told.contains(steering), "{steering:?} reached the terminal");
        }
    });

    // `top` works at any size.
    for (rows, columns) in [(1, 1), (2, 5), (5, 200), (60, 2)] {
        terminal.resize(rows, columns);
        terminal.press("jk?j");
    }
    terminal.resize(30, 150);
    terminal.shows("RESTARTS");
    terminal.press("\u{1b}");
    terminal.shows("filter: b");
    terminal.press("q");
    terminal.is_restored("as it was");
    assert!(terminal.text().contains("left with 0"), "{}", terminal.text());
}

#[test]
fn top_reconnects_after_supervisor_restart() {
    let mut supervisor = Supervisor::start(WORKERS);
    let Some(mut terminal) = Terminal::run(&supervisor, SCRIPT, &[]) else { return };
    (0..3).for_each(|_| submit(&supervisor, &["b"]));
    terminal.shows_as("a ready bulkhead", |text| row(text, "b").is_some_and(|row| row[1] == "ready"));

    supervisor.child.kill().expect("the supervisor is a child of this process");
    supervisor.wait();
    // The screen also shows why the supervisor cannot be reached.
    let text = terminal.shows_all(&["NOT REACHABLE for ", "admin.sock"]);
    assert_eq!(row(&text, "b").unwrap()[1], "ready", "the screen keeps the last known state");
    terminal.press("?");
    terminal.shows("press any key to go back");
    terminal.press("x");

    supervisor.child = Command::new(programs().join("bulkhead-supervisor"))
        .arg("--config")
        .arg(supervisor.file("workers.toml"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the supervisor's program runs");
    terminal.shows_as("the new supervisor", |text| {
        !text.contains("NOT REACHABLE") && row(text, "b").is_some_and(|row| row[1] == "ready")
    });
    submit(&supervisor, &["b", "abort"]);
    terminal.shows("job_crashed");
    // No rate is negative after the restart.
    assert!(!terminal.ask(|seen| String::from_utf8_lossy(&seen.bytes).contains("-0.")));

    // `top` sends no requests while it is paused, and catches up afterwards.
    terminal.press("p");
    terminal.shows("PAUSED");
    supervisor.post("/v1/bulkheads/b/drain");
    terminal.press("p");
    terminal.shows_as("the drain", |text| row(text, "b").is_some_and(|row| row[1] == "draining"));
    terminal.press("\u{3}");
    terminal.is_restored("as it was");
    assert!(terminal.text().contains("left with 130"), "{}", terminal.text());
}

#[test]
fn top_handles_keys_while_supervisor_hangs() {
    let supervisor = Supervisor::start(WORKERS);
    let Some(mut terminal) = Terminal::run(&supervisor, SCRIPT, &[]) else { return };
    terminal.shows("? help");
    supervisor.signal(Signal::SIGSTOP);
    // "NO RESPONSE" appears first, but the test can miss it on a busy machine.
    let is_told = |text: &str| text.contains("NO RESPONSE for") || text.contains("NOT REACHABLE for");
    terminal.shows_as("the missing response", is_told);
    terminal.press("?");
    terminal.shows("press any key to go back");
    terminal.press("xs");
    terminal.shows("sort: name");
    supervisor.signal(Signal::SIGCONT);
    terminal.shows("every 100ms");
    supervisor.signal(Signal::SIGSTOP);
    terminal.shows_as("the missing response", is_told);
    terminal.press("q");
    terminal.is_restored("as it was");
    supervisor.signal(Signal::SIGCONT);
}

#[test]
fn top_restores_the_terminal_on_signals() {
    let supervisor = Supervisor::start(WORKERS);
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129)] {
        let Some(terminal) = Terminal::run(&supervisor, SCRIPT, &[]) else { return };
        terminal.shows("? help");
        kill_pid(terminal.top(), signal);
        terminal.is_restored("as it was");
        assert!(terminal.text().contains(&format!("left with {code}")), "{}", terminal.text());
    }
}

#[test]
fn top_can_be_suspended_and_resumed() {
    let supervisor = Supervisor::start(WORKERS);
    let script =
        r#"set -m; "$TOP" top --interval 100ms; echo "stopped once"; read line; fg; echo "stopped again""#;
    let Some(mut terminal) = Terminal::run(&supervisor, script, &[]) else { return };
    terminal.shows("? help");
    terminal.press("\u{1a}");
    terminal.is_restored("stopped once");
    terminal.press("and so on\n");
    let is_back = |text: &str| text.contains("? help") && row(text, "b").is_some() && !text.contains("so on");
    terminal.shows_as("the screen again", is_back);
    assert!(terminal.ask(|seen| seen.parser.screen().alternate_screen()));
    kill_pid(terminal.top(), Signal::SIGTSTP);
    terminal.is_restored("stopped again");
}

#[test]
fn no_color_variable_disables_colours() {
    let supervisor = Supervisor::start(WORKERS);
    let cells = |variables: &[(&str, &str)]| {
        let terminal = Terminal::run(&supervisor, SCRIPT, variables)?;
        terminal.shows_as("the table", |text| text.contains("failed") && text.contains("? help"));
        Some(terminal.ask(|seen| {
            let screen = seen.parser.screen();
            let places = (0..24).flat_map(|row| (0..80).map(move |column| (row, column)));
            places.filter_map(|(row, column)| screen.cell(row, column)).cloned().collect::<Vec<_>>()
        }))
    };
    let is_coloured = |cell: &vt100::Cell| cell.fgcolor() != vt100::Color::Default;
    let Some(coloured) = cells(&[]) else { return };
    assert!(coloured.iter().any(is_coloured));
    assert!(cells(&[("NO_COLOR", "")]).unwrap().iter().any(is_coloured));
    let plain = cells(&[("NO_COLOR", "1")]).unwrap();
    assert!(!plain.iter().any(is_coloured));
    let count = |cells: &[vt100::Cell], is_it: fn(&vt100::Cell) -> bool| {
        cells.iter().filter(|cell| is_it(cell)).count()
    };
    for attribute in [vt100::Cell::inverse, vt100::Cell::dim, vt100::Cell::bold] {
        assert_eq!(count(&plain, attribute), count(&coloured, attribute));
        assert!(count(&plain, attribute) > 0);
    }
}

// Without a terminal.

fn ran(command: &mut Command) -> (Option<i32>, String, String) {
    let output = bulkhead_tests::output(command);
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn top_without_terminal_requires_once_or_json() {
    let supervisor = Supervisor::start(WORKERS);
    submit(&supervisor, &["b"]);
    let (code, told, why) = ran(supervisor.command().arg("top"));
    assert_eq!((code, told.as_str()), (Some(2), ""));
    assert!(why.contains("bulkhead status") && why.contains("--once"), "{why}");

    let once = ["top", "--once", "--interval", "100ms"];
    let (code, told, why) = ran(supervisor.command().args(once));
    assert_eq!((code, why.as_str()), (Some(0), ""), "{told}");
    assert!(told.starts_with("NAME ") || told.starts_with(" NAME "), "{told}");
    assert_eq!(
        row(&told, "b").unwrap()[..6],
        ["b", "ready", "ok", "1", "0/1", "0/7"].map(String::from),
        "{told}"
    );
    assert!(told.contains("worker_ready"), "{told}");

    let (code, told, _) = ran(supervisor.command().args(["top", "--json", "--interval", "100ms"]));
    assert_eq!((code, told.lines().count()), (Some(0), 1), "{told}");
    let told: Value = serde_json::from_str(&told).expect("JSON");
    let b = &told["bulkheads"][0];
    assert_eq!((&b["name"], &b["done"], &b["utilisation"]), (&"b".into(), &1.into(), &0.0.into()), "{b}");
    assert_eq!(b["per_second"]["crashed"].as_f64(), Some(0.0), "{b}");
    assert!(told["interval_ms"].as_u64() >= Some(100) && told["events"][0]["kind"].is_string(), "{told}");

    for odd in ["0s", "99ms", "61s", "x"] {
        assert_eq!(ran(supervisor.command().args(["top", "--interval", odd])).0, Some(2), "{odd}");
    }
}

#[test]
fn top_exits_69_without_supervisor() {
    let supervisor = Supervisor::start(WORKERS);
    let asked = |arguments: &[&str]| {
        let mut command = Command::new(programs().join("bulkhead"));
        command.args(arguments).arg("--socket").arg(supervisor.file("nothing/jobs.sock"));
        ran(command.env_remove("BULKHEAD_ADMIN"))
    };
    let expected = asked(&["status"]);
    assert_eq!(expected.0, Some(69));
    assert_eq!(asked(&["top", "--once"]), expected);
    let variables = [("BULKHEAD_ADMIN", "nothing/admin.sock")];
    let Some(terminal) = Terminal::run(&supervisor, SCRIPT, &variables) else { return };
    let text = terminal.shows("as it was");
    assert!(text.contains("left with 69") && text.contains("is the supervisor running?"), "{text}");
    assert!(!terminal.ask(|seen| String::from_utf8_lossy(&seen.bytes).contains("\u{1b}[?1049h")), "{text}");
}
