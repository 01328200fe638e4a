//! Defines the command-line arguments of `bulkhead-supervisor`. `main` runs the commands, and `pages` generates the man
//! page from this definition. All settings of bulkheads are in the configuration file instead.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Runs untrusted code in bounded, confined worker processes.
#[derive(Debug, Parser)]
#[command(name = "bulkhead-supervisor", version, max_term_width = 80)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Configuration file, which defines the bulkheads and their limits. Files in the conf.d directory next to
    /// this file add bulkheads [default: $BULKHEAD_CONFIG, else /etc/bulkhead/workers.toml for root, else
    /// ~/.config/bulkhead/workers.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check the configuration and print the resulting settings. The exit code is 0 if the configuration is
    /// valid, otherwise 2
    #[arg(long)]
    pub check: bool,

    /// With --check, also start one confined worker for each bulkhead, and report the cause of each failure
    #[arg(long, requires = "check")]
    pub start: bool,

    /// Print the JSON schema of the configuration file, for use in editors
    #[arg(long, exclusive = true)]
    pub schema: bool,

    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// Log level: error, warn, info, debug, trace, or a filter such as "info,bulkhead=debug"
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub log_level: String,

    /// Whether the log includes the standard output and standard error of workers; `bulkhead logs` always
    /// shows both
    #[arg(long, value_enum, default_value_t = LogOutput::On, value_name = "on|off")]
    pub log_output: LogOutput,

    /// Stop immediately when the other end of this inherited pipe or socket is closed, or when the process of
    /// this inherited pidfd has exited
    #[arg(long, value_name = "FD", conflicts_with_all = ["check", "schema"])]
    pub while_open: Option<i32>,

    /// Remove this directory and all its contents when the supervisor exits. The directory must belong to the
    /// supervisor's user and have mode 0700
    #[arg(long, value_name = "FOLDER", requires = "while_open")]
    pub own_folder: Option<PathBuf>,

    /// Take over from the running supervisor at the other end of this inherited socket. Used by `bulkhead upgrade`
    #[arg(long, value_name = "FD", hide = true, conflicts_with_all = ["check", "schema", "while_open"])]
    pub take_over: Option<i32>,

    /// Command to run instead of starting a supervisor
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// A command that runs instead of a supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// Print which layers of confinement are available for this user on this kernel, and why others are not
    Doctor {
        /// Print the result as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Write man pages for the supervisor, the host program and the configuration file
    Man {
        /// Target directory; created if missing
        #[arg(value_name = "DIR")]
        folder: PathBuf,
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
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicting_arguments_are_rejected() {
        let parse = |line: &str| Args::try_parse_from(line.split(' '));
        assert_eq!(parse("x --config a --check").unwrap().config, Some("a".into()));
        assert!(parse("x --config a --check --start").unwrap().start);
        assert_eq!(parse("x doctor --json").unwrap().command, Some(Command::Doctor { json: true }));
        assert!(parse("x --schema").unwrap().schema);
        // Without `--config`, the supervisor uses the default path.
        assert_eq!(parse("x").unwrap().config, None);
        assert!(parse("x --check").unwrap().check);
        for line in [
            "x --schema --config a",
            "x --schema --check",
            "x doctor --schema",
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
