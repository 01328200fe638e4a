//! Declares the command line of `bulkhead-fleet`. `program` runs the commands, and `pages` generates man pages from the
//! same declaration. Settings from `fleet.toml` are read elsewhere.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use bulkhead_client::Priority;
use clap::{Parser, Subcommand};

/// Run durable jobs on several hosts, over NATS JetStream
#[derive(Debug, Parser)]
#[command(name = "bulkhead-fleet", version, arg_required_else_help = true, max_term_width = 80)]
pub(crate) struct Args {
    /// Configuration file
    #[arg(
        long,
        global = true,
        env = "BULKHEAD_FLEET_CONFIG",
        default_value = "/etc/bulkhead/fleet.toml",
        value_name = "FILE",
        overrides_with = "config"
    )]
    pub(crate) config: PathBuf,

    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create the fleet's missing streams and consumers, and report differences
    ///
    /// Objects that differ from the configuration are not changed, and the exit status is 2. There are two safe
    /// exceptions: new bulkheads get subjects, and a bulkhead without waiting jobs gets the configured number of lanes.
    Init,
    /// Pull the fleet's jobs for the supervisor on this host
    Agent(Agent),
    /// Submit one or more jobs and print the results
    ///
    /// An accepted job survives the loss of any host.
    Submit(Submit),
    /// Print the result of a job that was submitted earlier
    Result(ResultOf),
    /// Show agents, waiting jobs and streams
    Status,
    /// List, show, resubmit or remove jobs whose outcome is not `ok`
    Dead(Dead),
    /// Start a server, a supervisor and two agents in a temporary directory, to try out a fleet
    ///
    /// Submits a hundred jobs and kills one agent partway through. Shows that each job has exactly one outcome.
    Try(Try),
    /// Run a program that is killed when its parent exits
    #[command(hide = true)]
    WithParent(WithParent),
    /// Write man pages
    Man {
        /// Target directory; created if missing
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Agent {
    /// Only check the configuration, print the effective values and exit
    #[arg(long)]
    pub(crate) check: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Submit {
    /// Name of the bulkhead
    pub(crate) name: String,

    /// Operation that the handler performs
    #[arg(default_value = "")]
    pub(crate) operation: String,

    /// ID of the job; jobs with the same ID run once [default: random]
    #[arg(long, conflicts_with = "repeat")]
    pub(crate) id: Option<String>,

    /// Print the ID as soon as the job is stored, and do not wait for the outcome
    #[arg(long, conflicts_with = "output")]
    pub(crate) detach: bool,

    /// File that contains the payload; use - for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) payload_file: Option<PathBuf>,

    /// Send an empty payload and do not read standard input [default: read the payload from standard input, except from
    /// a terminal]
    #[arg(short = 'n', long, conflicts_with = "payload_file")]
    pub(crate) no_input: bool,

    /// Write the result, or the output of a failed program, to FILE instead of standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Time limit from submission to outcome, including all attempts [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) deadline: Option<Duration>,

    /// Maximum run time of each attempt [default: set by the bulkhead]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) run_limit: Option<Duration>,

    /// Priority of the job: critical, normal or best-effort
    #[arg(long, default_value = "normal")]
    pub(crate) priority: Priority,

    /// Tenant that the job belongs to [default: from the configuration]
    #[arg(long)]
    pub(crate) tenant: Option<String>,

    /// Cost of the job for rate limiting
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) cost: u32,

    /// Declare that the job can safely run twice
    #[arg(long)]
    pub(crate) idempotent: bool,

    /// Submit N jobs; results are printed as they arrive
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) repeat: Option<u64>,

    /// Number of jobs in progress at the same time
    #[arg(long, default_value_t = 1, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) concurrency: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ResultOf {
    /// ID of the job
    pub(crate) id: String,

    /// Tenant that the job belongs to [default: from the configuration]
    #[arg(long)]
    pub(crate) tenant: Option<String>,

    /// Maximum time to wait for the outcome
    #[arg(long, default_value = "0s", value_name = "DURATION", value_parser = any_duration)]
    pub(crate) wait: Duration,

    /// Write the result to FILE instead of standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Dead {
    #[command(subcommand)]
    pub(crate) command: DeadCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeadCommand {
    /// List dead letters, newest first
    List {
        /// Show only this bulkhead
        #[arg(long, value_name = "NAME")]
        bulkhead: Option<String>,
        /// Show only this tenant
        #[arg(long)]
        tenant: Option<String>,
        /// Show at most N dead letters
        #[arg(long, default_value_t = 50, value_name = "N")]
        limit: usize,
    },
    /// Show a dead letter
    Show {
        /// ID of the job
        id: String,
        /// Tenant; required if several tenants have a job with this ID
        #[arg(long)]
        tenant: Option<String>,
        /// Write the payload to FILE; use - for standard output
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Resubmit jobs and remove their dead letters; repeating the request does not run a job twice
    Requeue(Selection),
    /// Remove dead letters
    Drop(Selection),
}

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["ids", "all"])))]
pub(crate) struct Selection {
    /// Job IDs
    pub(crate) ids: Vec<String>,
    /// Select all dead letters that match the other options
    #[arg(long)]
    pub(crate) all: bool,
    /// Select only dead letters of this bulkhead
    #[arg(long, value_name = "NAME")]
    pub(crate) bulkhead: Option<String>,
    /// Select only dead letters of this tenant
    #[arg(long)]
    pub(crate) tenant: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Try {
    /// NATS server executable [default: nats-server in PATH]
    #[arg(long, value_name = "PATH")]
    pub(crate) server: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct WithParent {
    /// Process ID of the parent
    pub(crate) parent: i32,

    /// Program to run
    pub(crate) program: PathBuf,

    /// Arguments of the program
    #[arg(last = true)]
    pub(crate) arguments: Vec<OsString>,
}

fn any_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}; use a duration such as 500ms, 2s or \"1m 30s\""))
}

fn duration(text: &str) -> Result<Duration, String> {
    any_duration(text).and_then(|time| match time.is_zero() {
        true => Err("must be greater than zero".into()),
        false => Ok(time),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }
}
