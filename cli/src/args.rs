//! The command line of `bulkhead`.

use std::path::PathBuf;
use std::time::Duration;

use bulkhead_client::Priority;
use clap::{Parser, Subcommand};

/// Submit jobs to a bulkhead-supervisor, and operate the supervisor
#[derive(Debug, Parser)]
#[command(name = "bulkhead", version, arg_required_else_help = true)]
pub(crate) struct Args {
    /// Jobs socket of the supervisor
    #[arg(long, global = true, env = "BULKHEAD_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Admin socket of the supervisor; defaults to admin.sock next to the jobs socket
    #[arg(long, global = true, env = "BULKHEAD_ADMIN", value_name = "PATH")]
    pub(crate) admin: Option<PathBuf>,

    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Submit one or more jobs and print the results
    Submit(Submit),
    /// Show all bulkheads, or one bulkhead with workers and recent events
    Status {
        /// Name of the bulkhead
        name: Option<String>,
        /// Show only this tenant of a bulkhead in which tenants have separate workers
        #[arg(long, requires = "name")]
        tenant: Option<String>,
    },
    /// Show live rates and events of all bulkheads in full-screen mode
    ///
    /// Press ? for help, or q to quit. Without a terminal, use --once or --json, which sample for one
    /// interval, print the result and exit.
    Top(Top),
    /// Show events
    Events {
        /// Keep printing new events
        #[arg(long, short)]
        follow: bool,
    },
    /// Show what the workers of a bulkhead wrote to stdout and stderr
    Logs {
        /// Name of the bulkhead
        name: String,
        /// Keep printing new output
        #[arg(long, short)]
        follow: bool,
    },
    /// Replace the workers of a bulkhead; each replacement is ready before the old worker stops
    Restart {
        /// Name of the bulkhead
        name: String,
    },
    /// Stop a bulkhead from accepting jobs
    Drain {
        /// Name of the bulkhead
        name: String,
    },
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
    /// Recommend limits for all bulkheads or one, based on recent load, and print the reasons
    ///
    /// The recommendations are based on the last one to two hours: on the numbers of jobs in flight, queued
    /// and rejected, on run times, and on the resource usage of workers. The output includes the command to
    /// run and the lines to add to the configuration file.
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
    /// Replace the supervisor's program without losing, refusing or repeating a job
    ///
    /// The running program starts the new one beside it, hands over when every bulkhead is ready, and finishes the jobs
    /// that it has accepted. If a step fails, the old program serves on. Both sets of workers run at the same time, so the
    /// machine needs memory for both. The exit status is 0 ten seconds after the new program has begun to serve, 1 if the
    /// old program serves on, 2 if the supervisor cannot be upgraded, and 75 if an upgrade is under way.
    Upgrade(Upgrade),
    /// List crash reports, or show one
    Crashes(Crashes),
    /// Run the payload of a crash report again in a dedicated worker, and report whether the job crashes the
    /// same way
    ///
    /// Runs the job that caused the crash, if known. Otherwise runs each job that was in flight, one after
    /// the other, until one crashes the same way. The exit status is 0 if a job ran, whatever the result.
    Replay {
        /// Id of the crash report
        id: String,
        /// Run only the job with this index in the report, counted from 0
        #[arg(long, value_name = "N")]
        job: Option<u32>,
    },
    /// Put load on a bulkhead, and print throughput and latency
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
    /// Program to start. Default: the path by which the supervisor was started
    #[arg(long, value_name = "PATH")]
    pub(crate) program: Option<PathBuf>,

    /// Upgrade even if a bulkhead that is ready has failed in the new program
    #[arg(long)]
    pub(crate) force: bool,

    /// Confirm that no program watches the process id of the supervisor. Required without a service manager that
    /// follows the main process (NOTIFY_SOCKET)
    #[arg(long)]
    pub(crate) unmanaged: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Crashes {
    /// Id of the crash report to show in full
    pub(crate) id: Option<String>,

    /// Show only reports of this bulkhead
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    pub(crate) bulkhead: Option<String>,

    /// Show at most N reports, newest first
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

    /// Number of jobs in flight at once
    #[arg(long, default_value_t = 1, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) concurrency: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) request: Request,

    /// Number of jobs in flight at once
    #[arg(long, default_value_t = 16, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) concurrency: u32,

    /// Time for which jobs are submitted
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) duration: Duration,

    /// Size of generated payloads in bytes, unless --payload-file is given
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub(crate) payload_bytes: usize,
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

/// Allowed sampling intervals of `top`. Shorter intervals would put too much load on the supervisor, and with
/// longer intervals the display would not be live.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(60);

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if INTERVALS.contains(&interval) { Ok(interval) } else { Err("must be from 100ms to 60s".into()) }
}

impl Args {
    /// Returns the path of the jobs socket from the command line, or the default path for a supervisor that
    /// this user runs.
    pub(crate) fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(default_socket)
    }

    /// Returns the path of the admin socket from the command line, or the path of `admin.sock` next to the
    /// jobs socket.
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
    fn command_line_definition_passes_clap_checks() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }
}
