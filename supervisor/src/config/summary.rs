//! A configuration written out as TOML, each value in full: what `--check` prints. Read again from the
//! same place it gives an equal configuration.

use std::fmt::{Display, Write as _};
use std::path::Path;
use std::time::Duration;

use super::checked::*;
use super::rlimits::Measure;
use super::rlimits::UNLIMITED;
use super::units;

impl Config {
    /// The effective configuration as TOML, defaults written out.
    ///
    /// A path from the file stands here as it was resolved, but for `argv[0]`, which the program sees: what
    /// it was resolved to is a comment. Paths that are not UTF-8 cannot be written in TOML exactly.
    ///
    /// ```no_run
    /// let config = bulkhead_supervisor::config::load("workers.toml".as_ref())?;
    /// println!("{}", config.summary());
    /// # Ok::<(), bulkhead_supervisor::config::ConfigErrors>(())
    /// ```
    pub fn summary(&self) -> String {
        let mut out = Lines::default();
        out.comment(format!("{}: {}", self.path.display(), self.counted()));
        out.supervisor(&self.supervisor);
        for bulkhead in &self.bulkheads {
            out.bulkhead(bulkhead);
        }
        out.text
    }

    fn counted(&self) -> String {
        let workers: u64 = self.bulkheads.iter().map(|bulkhead| u64::from(bulkhead.processes)).sum();
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        let bulkheads = self.bulkheads.len() as u64;
        format!("{bulkheads} bulkhead{}, {workers} worker{}", plural(bulkheads), plural(workers))
    }
}

/// TOML under construction.
#[derive(Default)]
struct Lines {
    text: String,
}

impl Lines {
    fn line(&mut self, line: impl Display) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn comment(&mut self, comment: impl Display) {
        self.line(format_args!("# {}", printable(&comment.to_string())));
    }

    fn set(&mut self, key: &str, value: impl Display) {
        self.line(format_args!("{key} = {value}"));
    }

    fn supervisor(&mut self, supervisor: &SupervisorConfig) {
        self.line("\n[supervisor]");
        self.set("socket", path(&supervisor.socket));
        self.set("socket_mode", format_args!("\"{:04o}\"", supervisor.socket_mode));
        self.set("admin", path(&supervisor.admin));
        self.set("drain_timeout", duration(supervisor.drain_timeout));
        self.set("max_clients", supervisor.max_clients);
        self.set("max_payload", size(supervisor.max_payload));
        self.set("max_buffered", size(supervisor.max_buffered));
    }

    fn bulkhead(&mut self, bulkhead: &BulkheadConfig) {
        self.line(format_args!("\n[bulkhead.{}]", key(&bulkhead.name)));
        self.program(&bulkhead.program);
        let env: Vec<_> =
            bulkhead.env.iter().map(|(name, value)| format!("{} = {}", key(name), string(value))).collect();
        self.set("env", braced(&env));
        self.set("cwd", path(&bulkhead.cwd));
        self.set("processes", bulkhead.processes);
        self.set("max_in_flight", bulkhead.max_in_flight);
        self.set("max_queue", bulkhead.max_queue);
        match bulkhead.queue_timeout {
            Some(timeout) => self.set("queue_timeout", duration(timeout)),
            None => self.comment("queue_timeout: until the deadline"),
        }
        self.set("deadline", duration(bulkhead.deadline));
        self.set("deadline_max", duration(bulkhead.deadline_max));
        self.set("grace", duration(bulkhead.grace));
        self.set("max_payload", size(bulkhead.max_payload));
        self.set("max_result", size(bulkhead.max_result));
        self.set("overflow", "\"reject\"");
        self.life(bulkhead);
        self.set("sandbox", "{ profile = \"none\" }");
        let rlimits: Vec<_> = bulkhead.rlimits.iter().map(rlimit).collect();
        self.set("rlimits", braced(&rlimits));
    }

    fn program(&mut self, program: &Program) {
        match program {
            Program::Command { argv, path } => self.arguments("command", argv, path),
            Program::Exec { argv, path } => self.arguments("exec", argv, path),
            Program::Library { path: library, entry } => {
                self.set("library", path(library));
                self.set("entry", string(entry));
            }
        }
    }

    fn arguments(&mut self, name: &str, argv: &[String], found: &Path) {
        let argv: Vec<_> = argv.iter().map(|argument| string(argument)).collect();
        self.set(name, format_args!("[{}]", argv.join(", ")));
        self.comment(format_args!("runs {}", found.display()));
    }

    fn life(&mut self, bulkhead: &BulkheadConfig) {
        let (restart, start, health) = (&bulkhead.restart, &bulkhead.start, &bulkhead.health);
        let restart = [
            format!("policy = \"{}\"", restart.policy.name()),
            format!("backoff = {}", duration(restart.backoff)),
            format!("backoff_max = {}", duration(restart.backoff_max)),
            format!("max = {}", restart.max),
            format!("within = {}", duration(restart.within)),
        ];
        self.set("restart", braced(&restart));
        let start = [
            format!("handshake = {}", duration(start.handshake)),
            format!("ready = {}", duration(start.ready)),
            "mode = \"spawn\"".to_owned(),
            "spares = 0".to_owned(),
        ];
        self.set("start", braced(&start));
        let health =
            [format!("heartbeat = {}", duration(health.heartbeat)), format!("missed = {}", health.missed)];
        self.set("health", braced(&health));
        let recycle = [
            bulkhead.recycle.jobs.map(|jobs| format!("jobs = {jobs}")),
            bulkhead.recycle.rss.map(|rss| format!("rss = {}", size(rss))),
            bulkhead.recycle.age.map(|age| format!("age = {}", duration(age))),
        ];
        let recycle: Vec<_> = recycle.into_iter().flatten().collect();
        self.set("recycle", braced(&recycle));
    }
}

fn braced(entries: &[String]) -> String {
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

fn rlimit(rlimit: &Rlimit) -> String {
    let value = match (rlimit.limit, rlimit.resource.measure()) {
        (None, _) => format!("\"{UNLIMITED}\""),
        (Some(bytes), Measure::Bytes) => size(bytes),
        (Some(seconds), Measure::Seconds) if seconds <= u64::MAX / 1000 => {
            duration(Duration::from_secs(seconds))
        }
        (Some(number), _) => number.to_string(),
    };
    format!("{} = {value}", rlimit.resource.name())
}

fn duration(duration: Duration) -> String {
    format!("\"{}\"", units::format_duration(duration))
}

fn size(bytes: u64) -> String {
    format!("\"{}\"", units::format_size(bytes))
}

fn path(path: &Path) -> String {
    string(&path.to_string_lossy())
}

/// A bare key where that is possible, else a quoted one.
fn key(name: &str) -> String {
    let bare =
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if bare { name.to_owned() } else { string(name) }
}

/// A basic string of TOML.
fn string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// A comment ends with its line.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
