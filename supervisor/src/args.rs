//! The command line of `bulkhead-supervisor`.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Runs untrusted code in bounded, confined worker processes.
#[derive(Debug, Parser)]
#[command(name = "bulkhead-supervisor", version)]
pub struct Args {
    /// The configuration: which bulkheads there are and what they may do
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,

    /// Verify the configuration, print what was understood, and exit with 0 or 2
    #[arg(long)]
    pub check: bool,

    /// How log lines look
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// What is logged: error, warn, info, debug, trace, or a filter such as "info,bulkhead=debug"
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}
