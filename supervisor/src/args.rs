//! The command line of `bulkhead-supervisor`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Runs untrusted code in bounded, confined worker processes.
#[derive(Debug, Parser)]
#[command(name = "bulkhead-supervisor", version)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    /// The configuration: which bulkheads there are and what they may do
    #[arg(long, value_name = "FILE", required_unless_present = "schema")]
    pub config: Option<PathBuf>,

    /// Verify the configuration, print what was understood, and exit with 0 or 2
    #[arg(long)]
    pub check: bool,

    /// With --check: also start one worker of each bulkhead as it would be confined, and say what stopped it
    #[arg(long, requires = "check")]
    pub start: bool,

    /// Print what a configuration may look like, as a JSON schema for editors
    #[arg(long, exclusive = true)]
    pub schema: bool,

    /// How log lines look
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// What is logged: error, warn, info, debug, trace, or a filter such as "info,bulkhead=debug"
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub log_level: String,

    /// Whether the log has what workers write to stdout and stderr; `bulkhead logs` has it in any case
    #[arg(long, value_enum, default_value_t = LogOutput::On, value_name = "WHETHER")]
    pub log_output: LogOutput,

    /// Stop at once when this inherited descriptor comes to its end: a pipe or socket whose other side is closed, or a
    /// pidfd whose process has ended
    #[arg(long, value_name = "FD", conflicts_with_all = ["check", "schema"])]
    pub while_open: Option<i32>,

    /// Remove this folder, with all that is in it, when the supervisor ends: one that a program made for a supervisor of
    /// its own. It has to be this user's alone (mode 0700)
    #[arg(long, value_name = "FOLDER", requires = "while_open")]
    pub own_folder: Option<PathBuf>,

    /// What to do instead
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What the program can do beside running.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// Print which layers of confinement this kernel and user can have, and why not
    Doctor {
        /// As one JSON array
        #[arg(long)]
        json: bool,
    },
}

/// Whether the log has the output of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[expect(missing_docs, reason = "the names say it")]
pub enum LogOutput {
    On,
    Off,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_or_a_command_is_needed_and_not_both() {
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
