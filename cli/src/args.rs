//! The command line of `bulkhead`.

use std::path::PathBuf;
use std::time::Duration;

use bulkhead_client::Priority;
use clap::{Parser, Subcommand};

/// Submits jobs to a bulkhead-supervisor, and looks after it.
#[derive(Debug, Parser)]
#[command(name = "bulkhead", version, arg_required_else_help = true)]
pub(crate) struct Args {
    /// The jobs socket of the supervisor
    #[arg(long, global = true, env = "BULKHEAD_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// The admin socket of the supervisor; without it, admin.sock beside the jobs socket
    #[arg(long, global = true, env = "BULKHEAD_ADMIN", value_name = "PATH")]
    pub(crate) admin: Option<PathBuf>,

    /// Print JSON, for programs
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Submit a job, or many, and print the result
    Submit(Submit),
    /// Show the bulkheads, or one of them with its workers and last events
    Status {
        /// Which bulkhead
        name: Option<String>,
        /// Only this tenant's part, where tenants have workers of their own
        #[arg(long, requires = "name")]
        tenant: Option<String>,
    },
    /// Show the bulkheads live, full screen, with rates and events
    ///
    /// Keys: ? lists them, q leaves. Without a terminal use --once or --json, which watch for one interval, print
    /// what was seen, and end.
    Top(Top),
    /// Show what happened
    Events {
        /// Go on with what happens
        #[arg(long, short)]
        follow: bool,
    },
    /// Show what the workers of a bulkhead wrote to stdout and stderr
    Logs {
        /// Which bulkhead
        name: String,
        /// Go on with what they write
        #[arg(long, short)]
        follow: bool,
    },
    /// Replace each worker of a bulkhead, the replacement ready first
    Restart {
        /// Which bulkhead
        name: String,
    },
    /// Have a bulkhead take no more jobs
    Drain {
        /// Which bulkhead
        name: String,
    },
    /// Have a bulkhead take jobs again
    Resume {
        /// Which bulkhead
        name: String,
    },
    /// Close the breaker of a bulkhead, let quarantined payloads in again, and start failed workers now
    Reset {
        /// Which bulkhead
        name: String,
    },
    /// Give a bulkhead other numbers at once, without dropping a job
    Resize(Resize),
    /// Say what the limits of the bulkheads should be, or those of one of them, from what was seen, and why
    ///
    /// Looks at the last one to two hours: how many jobs were in flight and waited, which were turned away, how long
    /// jobs took, and what workers used. Ends with what to type, and what to paste into the file.
    Advise {
        /// Which bulkhead
        name: Option<String>,
    },
    /// Have the supervisor read its configuration again, and print what that changes
    ///
    /// A file with errors changes nothing: they are printed, and the exit status is 2.
    Reload {
        /// Only print what would change
        #[arg(long)]
        dry_run: bool,
    },
    /// List the crash reports, or show one of them
    Crashes(Crashes),
    /// Run the payload of a crash report again, in a worker started for it alone, and say whether it crashes the
    /// same way
    ///
    /// Runs the job that did it, if that is known; otherwise each job that was in flight, one after the other,
    /// until one crashes the same way. Exits with 0 if a job was run, whatever came of it.
    Replay {
        /// Which report
        id: String,
        /// Only this job of it, counted from 0
        #[arg(long, value_name = "N")]
        job: Option<u32>,
    },
    /// Load a bulkhead and print throughput and latency
    Bench(Bench),
    /// Print completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Write man pages
    Man {
        /// The folder to write to; made if it is missing
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Top {
    /// How often to look, from 100ms to 60s; rates are those between two looks
    #[arg(long, default_value = "1s", value_name = "DURATION", value_parser = interval)]
    pub(crate) interval: Duration,

    /// Print what is seen within one interval, and end; --json does the same
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Crashes {
    /// Which report, with all that is known
    pub(crate) id: Option<String>,

    /// Only those of this bulkhead
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    pub(crate) bulkhead: Option<String>,

    /// Only so many, the newest
    #[arg(long, value_name = "N", conflicts_with = "id")]
    pub(crate) limit: Option<usize>,

    /// Write the payload of the job that did it, or of --job, to this file; - for standard output
    #[arg(long, value_name = "FILE", requires = "id")]
    pub(crate) output: Option<PathBuf>,

    /// Which of its jobs, counted from 0
    #[arg(long, value_name = "N", requires = "output")]
    pub(crate) job: Option<usize>,
}

/// Numbers to put in force; what is not named stays.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("numbers").required(true).multiple(true)))]
pub(crate) struct Resize {
    /// Which bulkhead
    pub(crate) name: String,

    /// Only for this tenant, in place of the bulkhead's numbers
    #[arg(long, conflicts_with = "breaker", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) tenant: Option<String>,

    /// Jobs in flight per worker process
    #[arg(long, value_name = "N", group = "numbers")]
    pub(crate) max_in_flight: Option<u32>,

    /// Worker processes
    #[arg(long, value_name = "N", group = "numbers")]
    pub(crate) processes: Option<u32>,

    /// Jobs that may wait
    #[arg(long, value_name = "N", group = "numbers")]
    pub(crate) max_queue: Option<u32>,

    /// Jobs a second in the long run
    #[arg(long, value_name = "PER_SECOND", group = "numbers")]
    pub(crate) rate: Option<f64>,

    /// Jobs that may come at once after a pause [default: --rate, rounded up]
    #[arg(long, value_name = "N", requires = "rate")]
    pub(crate) burst: Option<u32>,

    /// forced_open, or auto to leave it to itself
    #[arg(long, value_name = "MODE", group = "numbers", value_parser = ["forced_open", "auto"])]
    pub(crate) breaker: Option<String>,
}

/// What a job asks for.
#[derive(Debug, clap::Args)]
pub(crate) struct Request {
    /// Which bulkhead
    pub(crate) name: String,

    /// What the handler is to do
    #[arg(default_value = "")]
    pub(crate) operation: String,

    /// The payload; - for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) payload_file: Option<PathBuf>,

    /// How long the job may take, such as 500ms [default: the bulkhead's own]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) deadline: Option<Duration>,

    /// How long each attempt may run, whatever it waited [default: the bulkhead's own]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) run_limit: Option<Duration>,

    /// critical, normal or best-effort
    #[arg(long, default_value = "normal")]
    pub(crate) priority: Priority,

    /// On whose behalf
    #[arg(long, default_value = "")]
    pub(crate) tenant: String,

    /// What the job counts against a rate limit
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) cost: u32,

    /// The job may safely run twice
    #[arg(long)]
    pub(crate) idempotent: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Submit {
    #[command(flatten)]
    pub(crate) request: Request,

    /// Send an empty payload, and leave standard input alone: for loops that read it [default: standard input is the
    /// payload, unless it is a terminal]
    #[arg(short = 'n', long, conflicts_with = "payload_file")]
    pub(crate) no_input: bool,

    /// Write the result, or the output of a program that failed, there instead of to standard output; of many jobs, the
    /// last one stays
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Submit so many jobs; their results come as they are ready
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) repeat: Option<u64>,

    /// Keep so many jobs under way at once
    #[arg(long, default_value_t = 1, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) concurrency: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) request: Request,

    /// Keep so many jobs under way at once
    #[arg(long, default_value_t = 16, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) concurrency: u32,

    /// For so long
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) duration: Duration,

    /// With payloads of so many bytes, unless there is a payload file
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub(crate) payload_bytes: usize,
}

fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration.is_zero() => Err("must be more than nothing".into()),
        Err(_) if text.strip_prefix('-').is_some_and(|rest| humantime::parse_duration(rest).is_ok()) => {
            Err("must be more than nothing".into())
        }
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("{error}; write it like 500ms, 2s or \"1m 30s\"")),
    }
}

/// How often `top` may look: oftener is a load on the supervisor, and more seldom is not live.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(60);

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if INTERVALS.contains(&interval) { Ok(interval) } else { Err("must be from 100ms to 60s".into()) }
}

impl Args {
    /// The jobs socket: as given, or where a supervisor of this user has it by default.
    pub(crate) fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(default_socket)
    }

    /// The admin socket: as given, or beside the jobs socket.
    pub(crate) fn admin(&self) -> PathBuf {
        self.admin.clone().unwrap_or_else(|| self.socket().with_file_name("admin.sock"))
    }
}

fn default_socket() -> PathBuf {
    let is_root =
        std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !is_root).unwrap_or_else(|| "/run".into());
    PathBuf::from(folder).join("bulkhead/jobs.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }
}
