//! Defines and parses the command line of `bulkhead`. Determines from options and environment variables which
//! supervisor a command uses. `main` runs the subcommands, and `pages` generates man pages from this definition.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use bulkhead_api::{CauseKind, EventKind, JobProgress, Severity, Vocabulary};
use bulkhead_client::{JobId, PAYLOAD_BYTES_CEILING, Priority};
use bulkhead_linux::runtime_dir;
use clap::builder::{RangedU64ValueParser, Resettable};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::output::{Failure, exit};
use crate::target::{Host, Target};
use crate::times;

/// Heading of the options that all subcommands share. Without a heading, the help would mix them with the subcommand's
/// own options.
const GLOBAL: &str = "Options for all commands";

/// Submit jobs to a bulkhead-supervisor, and operate the supervisor
#[derive(Debug, Parser)]
#[command(name = "bulkhead", version, arg_required_else_help = true, max_term_width = 80)]
pub(crate) struct Args {
    /// Jobs socket of the supervisor
    #[arg(long, global = true, env = "BULKHEAD_SOCKET", value_name = "PATH", help_heading = GLOBAL)]
    pub(crate) socket: Option<PathBuf>,

    /// Admin socket of the supervisor; defaults to admin.sock next to the jobs socket
    #[arg(long, global = true, env = "BULKHEAD_ADMIN", value_name = "PATH", help_heading = GLOBAL)]
    pub(crate) admin: Option<PathBuf>,

    /// Admin API of a supervisor over TCP, such as http://127.0.0.1:9464, instead of the admin socket
    ///
    /// `submit` and `bench` need the jobs socket and do not use this option.
    #[arg(long, global = true, env = "BULKHEAD_HOST", value_name = "URL", help_heading = GLOBAL)]
    pub(crate) host: Option<String>,

    /// File that contains the token for --host
    #[arg(long, global = true, env = "BULKHEAD_TOKEN_FILE", value_name = "FILE", help_heading = GLOBAL)]
    pub(crate) token_file: Option<PathBuf>,

    /// Options that the user has set on the command line or through environment variables.
    #[arg(skip)]
    given: Given,

    /// Print JSON
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Submit one or more jobs and print the results
    Submit(Submit),
    /// Show all bulkheads, or one bulkhead with its workers and recent events
    Status(Status),
    /// Show live rates and events of all bulkheads in full-screen mode
    ///
    /// Press ? for help, or q to quit. Without a terminal, use --once or --json, which sample for one
    /// interval, print the result and exit.
    Top(Top),
    /// Show events
    Events(Events),
    /// Show what workers wrote to stdout and stderr, ordered by time
    Logs(Logs),
    /// Show running and waiting jobs, oldest first
    ///
    /// A job is listed until its client has the outcome.
    Jobs(ListJobs),
    /// Cancel a running or waiting job; its client receives the outcome `cancelled`
    Cancel(Cancel),
    /// Check whether the supervisor, or a bulkhead, is ready for jobs
    ///
    /// The exit status is 0 if it is ready, otherwise 3.
    IsReady(IsReady),
    /// Replace the workers of a bulkhead; each replacement is ready before the old worker stops
    Restart(Restart),
    /// Stop a bulkhead, or all bulkheads, from accepting jobs
    Drain(Drain),
    /// Let a bulkhead accept jobs again
    Resume {
        /// Name of the bulkhead
        name: String,
    },
    /// Close the circuit breaker of a bulkhead, clear the quarantine, and start failed workers immediately
    Reset {
        /// Name of the bulkhead
        name: String,
    },
    /// Change the limits of a bulkhead immediately, without dropping jobs
    Resize(Resize),
    /// Recommend limits for one or all bulkheads, based on recent load, and print the reasons
    ///
    /// The recommendations are based on measurements from the last one to two hours: jobs in flight, queued and
    /// rejected, run times, and the resource usage of workers. The output includes the command to run and the lines to
    /// add to the configuration file.
    Advise {
        /// Name of the bulkhead
        name: Option<String>,
    },
    /// Reload the supervisor's configuration, and print the changes
    ///
    /// If the file has errors, nothing changes, the errors are printed, and the exit status is 2.
    Reload {
        /// Only print what would change
        #[arg(long)]
        dry_run: bool,
    },
    /// Replace the supervisor's program without losing, rejecting or repeating a job
    ///
    /// The running program starts the new program, hands over when every bulkhead is ready, and finishes the jobs that
    /// it has accepted. If a step fails, the old program continues to serve. Both sets of workers run at the same time,
    /// so the machine needs memory for both. The command waits until the new program has served for ten seconds. The
    /// exit status is then 0. It is 1 if the old program continues to serve, 2 if the supervisor cannot be upgraded,
    /// and 75 if an upgrade is already in progress.
    Upgrade(Upgrade),
    /// List crash reports, or show one
    Crashes(Crashes),
    /// Run the payload of a crash report again in a dedicated worker, and report whether it crashes the same way
    ///
    /// Runs the job that caused the crash, if known. Otherwise runs each job that was in flight, one at a time, until
    /// one crashes the same way. The exit status is 0 if a job ran, whatever the result.
    Replay {
        /// ID of the crash report, the beginning of the ID, or `last`
        id: String,
        /// Run only the job with this index in the report, counted from 0
        #[arg(long, value_name = "N")]
        job: Option<u32>,
    },
    /// Put load on a bulkhead and print throughput and latency
    ///
    /// The exit status is 0 if any job was `ok`, 69 if the supervisor was not reachable for a job, and otherwise that of
    /// the last job.
    Bench(Bench),
    /// Run durable jobs on several hosts: runs bulkhead-fleet with these arguments
    #[command(disable_help_flag = true)]
    Fleet {
        /// Arguments of bulkhead-fleet; --help lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Print shell completions
    Completions {
        /// Shell to generate completions for
        shell: clap_complete::Shell,
    },
    /// Write man pages
    Man {
        /// Target directory; created if missing
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Status {
    /// Name of the bulkhead
    pub(crate) name: Option<String>,

    /// Show only this tenant of a bulkhead in which tenants have separate workers
    #[arg(long, requires = "name")]
    pub(crate) tenant: Option<String>,

    /// Show only bulkheads that lack workers or whose jobs fail
    #[arg(long, conflicts_with = "name")]
    pub(crate) failed: bool,

    /// Order of the bulkheads [default: trouble; with --json, the order in the configuration]
    #[arg(long, value_name = "ORDER", conflicts_with = "name")]
    pub(crate) sort: Option<Sort>,
}

/// Order of a list of bulkheads.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Sort {
    /// Worst first
    Trouble,
    Name,
    /// Longest queue first
    Queue,
    /// Most rejected jobs first
    Rejected,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Events {
    /// Show only events of this bulkhead
    #[arg(long, value_name = "NAME")]
    pub(crate) bulkhead: Option<String>,

    /// Show only events of these kinds, separated by commas
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = event_kind)]
    pub(crate) kind: Vec<String>,

    /// Show only events that are at least this severe: info, warning or critical
    #[arg(long, value_name = "SEVERITY", value_parser = word::<Severity>)]
    pub(crate) severity: Option<Severity>,

    /// Show only events since TIME, such as 10m (ago), 14:07 (UTC) or 2026-11-21T14:07:35Z
    #[arg(long, value_name = "TIME", value_parser = times::since, allow_hyphen_values = true)]
    pub(crate) since: Option<SystemTime>,

    /// Show only the newest N stored events
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) lines: Option<usize>,

    /// Keep printing new events
    #[arg(long, short)]
    pub(crate) follow: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Logs {
    /// Names of bulkheads [default: all]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,

    /// Show only the newest N stored lines
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) lines: Option<usize>,

    /// Show only lines since TIME, such as 10m (ago), 14:07 (UTC) or 2026-11-21T14:07:35Z
    #[arg(long, value_name = "TIME", value_parser = times::since, allow_hyphen_values = true)]
    pub(crate) since: Option<SystemTime>,

    /// Show only lines until TIME
    #[arg(long, value_name = "TIME", value_parser = times::until, allow_hyphen_values = true, conflicts_with = "follow")]
    pub(crate) until: Option<SystemTime>,

    /// Show only lines of this stream
    #[arg(long)]
    pub(crate) stream: Option<OutputStream>,

    /// Keep printing new output, from at most 64 bulkheads
    #[arg(long, short)]
    pub(crate) follow: bool,

    /// Format of the lines
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "short",
        conflicts_with = "json"
    )]
    pub(crate) format: LogFormat,
}

/// Standard stream of a worker.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum OutputStream {
    Stdout,
    Stderr,
}

impl OutputStream {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// Format of lines of output.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Time, bulkhead, process ID, stream and text
    Short,
    /// Text only
    Cat,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListJobs {
    /// Name of the bulkhead that holds the jobs
    pub(crate) name: Option<String>,

    /// Show only jobs in this state: queued, prefetched (waiting in a worker) or running
    #[arg(long, value_name = "STATE", value_parser = word::<JobProgress>)]
    pub(crate) state: Option<JobProgress>,

    /// Show only the oldest N jobs
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) lines: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Cancel {
    /// Name of the bulkhead that holds the job
    pub(crate) name: String,

    /// Number of the job, as shown by `bulkhead jobs`
    pub(crate) job: JobId,
}

#[derive(Debug, clap::Args)]
pub(crate) struct IsReady {
    /// Name of the bulkhead [default: the supervisor as a whole]
    pub(crate) name: Option<String>,

    /// Wait up to TIME until it is ready, including for the supervisor to start
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) wait: Option<Duration>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Restart {
    /// Name of the bulkhead
    pub(crate) name: String,

    /// Wait up to TIME until all workers have been replaced; after that, the exit status is 124
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, value_parser = duration)]
    pub(crate) wait: Option<Option<Duration>>,
}

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["name", "all"])))]
pub(crate) struct Drain {
    /// Name of the bulkhead
    pub(crate) name: Option<String>,

    /// Drain all bulkheads
    #[arg(long)]
    pub(crate) all: bool,

    /// Wait up to TIME until no jobs are left; after that, the exit status is 124
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, value_parser = duration)]
    pub(crate) wait: Option<Option<Duration>>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Top {
    /// Sampling interval, from 100ms to 60s; rates are averages over one interval
    #[arg(long, default_value = "1s", value_name = "DURATION", value_parser = interval)]
    pub(crate) interval: Duration,

    /// Sample for one interval, print the result and exit, as --json does
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Upgrade {
    /// Program to start [default: the path by which the supervisor was started]
    #[arg(long, value_name = "PATH")]
    pub(crate) program: Option<PathBuf>,

    /// Upgrade even if a bulkhead that is ready has failed in the new program
    #[arg(long)]
    pub(crate) force: bool,

    /// Confirm that no program watches the process ID of the supervisor. Required if no service manager follows the
    /// main process (NOTIFY_SOCKET)
    #[arg(long)]
    pub(crate) unmanaged: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Crashes {
    /// ID of the crash report to show in full, the beginning of the ID, or `last`
    pub(crate) id: Option<String>,

    /// Show only reports of this bulkhead
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    pub(crate) bulkhead: Option<String>,

    /// Show only crashes since TIME, such as 10m (ago), 14:07 (UTC) or 2026-11-21T14:07:35Z
    #[arg(long, value_name = "TIME", value_parser = times::since, allow_hyphen_values = true, conflicts_with = "id")]
    pub(crate) since: Option<SystemTime>,

    /// Show only crashes with this cause, such as SIGSEGV, exit:3, oom, hung or violation
    #[arg(long, value_name = "CAUSE", value_parser = cause, conflicts_with = "id")]
    pub(crate) cause: Option<String>,

    /// Show only the newest N reports
    #[arg(long, value_name = "N", conflicts_with = "id")]
    pub(crate) limit: Option<usize>,

    /// Write the payload of the job that caused the crash, or of --job, to FILE; use - for standard output
    #[arg(long, value_name = "FILE", requires = "id")]
    pub(crate) output: Option<PathBuf>,

    /// Index of the job in the report, counted from 0
    #[arg(long, value_name = "N", requires = "output")]
    pub(crate) job: Option<usize>,
}

/// Change the limits of a bulkhead; limits that are not given stay unchanged
#[derive(Debug, clap::Args)]
#[command(override_usage = "bulkhead resize [OPTIONS] <NAME>")]
#[command(group(clap::ArgGroup::new("numbers").required(true).multiple(true)))]
pub(crate) struct Resize {
    /// Name of the bulkhead
    pub(crate) name: String,

    /// Change the limits of this tenant instead of those of the bulkhead
    #[arg(long, conflicts_with = "breaker", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) tenant: Option<String>,

    /// Maximum number of jobs in flight per worker process
    #[arg(long, value_name = "N", group = "numbers")]
    pub(crate) max_in_flight: Option<u32>,

    /// Number of worker processes
    #[arg(long, value_name = "N", group = "numbers")]
    pub(crate) processes: Option<u32>,

    /// Maximum number of queued jobs
    #[arg(long, value_name = "N", group = "numbers")]
    pub(crate) max_queue: Option<u32>,

    /// Sustained rate in jobs per second
    #[arg(long, value_name = "PER_SECOND", group = "numbers")]
    pub(crate) rate: Option<f64>,

    /// Maximum number of jobs in a burst [default: --rate, rounded up]
    #[arg(long, value_name = "N", requires = "rate")]
    pub(crate) burst: Option<u32>,

    /// Mode of the circuit breaker: forced_open, or auto for normal operation
    #[arg(long, value_name = "MODE", group = "numbers", value_parser = ["forced_open", "auto"])]
    pub(crate) breaker: Option<String>,
}

/// Options of a submitted job.
#[derive(Debug, clap::Args)]
pub(crate) struct Request {
    /// Name of the bulkhead
    pub(crate) name: String,

    /// Operation that the handler performs
    #[arg(default_value = "")]
    pub(crate) operation: String,

    /// File that contains the payload; use - for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) payload_file: Option<PathBuf>,

    /// Time limit for the job, such as 500ms [default: set by the bulkhead]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) deadline: Option<Duration>,

    /// Maximum run time of each attempt, not counting time in the queue [default: set by the bulkhead]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) run_limit: Option<Duration>,

    /// Priority of the job: critical, normal or best-effort
    #[arg(long, default_value = "normal")]
    pub(crate) priority: Priority,

    /// Tenant that the job belongs to
    #[arg(long, default_value = "")]
    pub(crate) tenant: String,

    /// Cost of the job for rate limiting
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) cost: u32,

    /// Declare that the job can safely run twice
    #[arg(long)]
    pub(crate) idempotent: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Submit {
    #[command(flatten)]
    pub(crate) request: Request,

    /// Send an empty payload and do not read standard input, for use in loops that read standard input
    /// [default: read the payload from standard input, unless it is a terminal]
    #[arg(short = 'n', long, conflicts_with = "payload_file")]
    pub(crate) no_input: bool,

    /// Write the result, or the output of a failed program, to FILE instead of standard output; with several
    /// jobs, FILE contains the last result
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Submit N jobs; results are printed as they arrive
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) repeat: Option<u64>,

    /// Number of jobs in flight
    #[arg(long, default_value_t = 1, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) concurrency: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) request: Request,

    /// Number of jobs in flight
    #[arg(long, default_value_t = 16, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) concurrency: u32,

    /// Time for which jobs are submitted
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = bench_duration, allow_hyphen_values = true)]
    pub(crate) duration: Duration,

    /// Size of generated payloads in bytes, unless --payload-file is given
    #[arg(long, default_value_t = 64, value_name = "N",
        value_parser = RangedU64ValueParser::<usize>::new().range(..=PAYLOAD_BYTES_CEILING))]
    pub(crate) payload_bytes: usize,
}

/// Parses one of the words in the vocabulary `V`.
fn word<V: Vocabulary>(text: &str) -> Result<V, String> {
    V::from_word(text).ok_or_else(|| format!("valid values: {}", V::WORDS.join(", ")))
}

fn event_kind(text: &str) -> Result<String, String> {
    match EventKind::KINDS.contains(&text) {
        true => Ok(text.to_owned()),
        false => Err(format!("unknown event kind; valid kinds: {}", EventKind::KINDS.join(", "))),
    }
}

/// Checks that `text` is a valid cause of a crash: either a kind, or a short form from the list of crashes.
fn cause(text: &str) -> Result<String, String> {
    let of_process = text.strip_prefix("program:").unwrap_or(text);
    let (kind, detail) = of_process.split_once(':').unwrap_or((of_process, ""));
    let is_signal = kind.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("SIG"));
    let is_kind = CauseKind::from_word(&kind.to_ascii_lowercase()).is_some();
    let is_detailed = ["exit", "violation"].iter().any(|with| kind.eq_ignore_ascii_case(with));
    match is_signal || is_kind && (detail.is_empty() || is_detailed) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "unknown cause; use a signal such as SIGSEGV, an exit status such as exit:3, or a kind: {}",
            CauseKind::WORDS.join(", ")
        )),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration.is_zero() => Err("must be greater than zero".into()),
        Err(_) if text.strip_prefix('-').is_some_and(|rest| humantime::parse_duration(rest).is_ok()) => {
            Err("must be greater than zero".into())
        }
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("{error}; use a duration such as 500ms, 2s or \"1m 30s\"")),
    }
}

/// Sampling intervals that `top` allows. Shorter intervals would put too much load on the supervisor, and longer
/// intervals would make the display stale.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(60);

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if INTERVALS.contains(&interval) { Ok(interval) } else { Err("must be from 100ms to 60s".into()) }
}

/// Maximum duration of a bench. A time much further in the future cannot be represented.
const BENCH_DURATION_MAX: Duration = Duration::from_secs(365 * 86_400);

fn bench_duration(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    if time <= BENCH_DURATION_MAX { Ok(time) } else { Err("must be at most 365days".into()) }
}

/// Options that determine which supervisor a command uses.
#[derive(Debug, Default)]
struct Given {
    /// True if the user has specified a socket on the command line.
    socket_flag: bool,
    /// True if the user has specified the jobs socket. `BULKHEAD_SOCKET` does not count if the command line contains
    /// `--host`, because the jobs would then go to a different supervisor.
    jobs_socket: bool,
}

impl Args {
    /// Parses the command line.
    pub(crate) fn from_command_line() -> Result<Self, clap::Error> {
        let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
        // An empty variable counts as unset.
        let command = Self::command().mut_args(|option| match option.get_env().is_some_and(is_empty) {
            true => option.env(Resettable::<clap::builder::OsStr>::Reset),
            false => option,
        });
        let matches = command.try_get_matches()?;
        let mut args = Self::from_arg_matches(&matches)?;
        let source = |option: &str| matches.value_source(option);
        let has_flag = |option: &str| source(option) == Some(ValueSource::CommandLine);
        let socket_flag = has_flag("socket") || has_flag("admin");
        if socket_flag && has_flag("host") {
            let message = "--host cannot be combined with --socket or --admin: specify only one supervisor";
            return Err(Self::command().error(ErrorKind::ArgumentConflict, message));
        }
        // A socket on the command line takes precedence over `BULKHEAD_ADMIN`, which can belong to a different
        // supervisor.
        if has_flag("socket") && !has_flag("admin") {
            args.admin = None;
        }
        args.given = Given { socket_flag, jobs_socket: source("socket").is_some() && !has_flag("host") };
        args.host = args.host.filter(|host| !host.is_empty());
        Ok(args)
    }

    /// Returns the address of the supervisor's admin API. A socket given on the command line takes precedence over
    /// `BULKHEAD_HOST`.
    pub(crate) fn target(&self) -> Result<Target, Failure> {
        match self.host.as_ref().filter(|_| !self.given.socket_flag) {
            Some(url) => match Host::parse(url, self.token_file.clone()) {
                Ok(host) => Ok(Target::Host(host)),
                Err(problem) => {
                    let message = format!("--host or BULKHEAD_HOST '{}': {problem}", url.escape_debug());
                    Err(Failure::new(exit::USAGE, message))
                }
            },
            None => Ok(Target::Socket(self.admin())),
        }
    }

    /// Returns the path of the jobs socket from the command line, or the default path for a supervisor run by this
    /// user.
    ///
    /// # Errors
    ///
    /// Fails if the user has specified a supervisor only with `--host`.
    pub(crate) fn jobs_socket(&self) -> Result<PathBuf, Failure> {
        if self.host.is_some() && !self.given.jobs_socket {
            let message = "this command sends jobs over the jobs socket, and cannot use --host or BULKHEAD_HOST: \
                           name the socket with --socket, or send jobs over HTTP";
            return Err(Failure::new(exit::USAGE, message));
        }
        Ok(self.socket())
    }

    fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(default_socket)
    }

    /// Returns the path of the admin socket from the command line, or the path of `admin.sock` next to the
    /// jobs socket.
    fn admin(&self) -> PathBuf {
        self.admin.clone().unwrap_or_else(|| self.socket().with_file_name("admin.sock"))
    }
}

fn default_socket() -> PathBuf {
    runtime_dir::of_process().join("bulkhead/jobs.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_passes_clap_checks() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }
}
