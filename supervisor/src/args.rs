//! The command line of `bulkhead-supervisor`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Runs untrusted code in bounded, confined worker processes.
#[derive(Debug, Parser)]
#[command(name = "bulkhead-supervisor", version)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    /// The configuration file, which defines the bulkheads and their limits
    #[arg(long, value_name = "FILE", required_unless_present = "schema")]
    pub config: Option<PathBuf>,

    /// Check the configuration, print the resulting settings, and exit with 0 or 2
    #[arg(long)]
    pub check: bool,

    /// With --check: also start one confined worker of each bulkhead, and report each failure with its cause
    #[arg(long, requires = "check")]
    pub start: bool,

    /// Print the JSON schema of the configuration, for editors
    #[arg(long, exclusive = true)]
    pub schema: bool,

    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// Log level: error, warn, info, debug, trace, or a filter such as "info,bulkhead=debug"
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub log_level: String,

    /// Whether the log includes the stdout and stderr of workers; `bulkhead logs` always shows both
    #[arg(long, value_enum, default_value_t = LogOutput::On, value_name = "WHETHER")]
    pub log_output: LogOutput,

    /// Stop at once when this inherited descriptor is closed at its other end (a pipe or socket), or its
    /// process has ended (a pidfd)
    #[arg(long, value_name = "FD", conflicts_with_all = ["check", "schema"])]
    pub while_open: Option<i32>,

    /// Remove this folder with its contents when the supervisor ends. The folder must belong to this user and
    /// have mode 0700
    #[arg(long, value_name = "FOLDER", requires = "while_open")]
    pub own_folder: Option<PathBuf>,

    /// Command to run instead of a supervisor
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// A command that runs instead of a supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// Print which layers of confinement this kernel and user support, and the reasons for missing ones
    Doctor {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
}

/// Whether the log includes the output of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[expect(missing_docs, reason = "self-explanatory names")]
pub enum LogOutput {
    On,
    Off,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// A JSON object per line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supervisor_requires_configuration_or_command() {
        let parse = |line: &str| Args::try_parse_from(line.split(' '));
        assert_eq!(parse("x --config a --check").unwrap().config, Some("a".into()));
        assert!(parse("x --config a --check --start").unwrap().start);
        assert_eq!(parse("x doctor --json").unwrap().command, Some(Command::Doctor { json: true }));
        assert!(parse("x --schema").unwrap().schema);
        for line in [
            "x",
            "x --schema --config a",
            "x --schema --check",
            "x doctor --schema",
            "x --check",
            "x --config a --start",
            "x --config a doctor",
            "x doctor --config a",
            "x doctor --check",
            "x other",
            "x --config a --own-folder b",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
