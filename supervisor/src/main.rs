//! The `bulkhead-supervisor` program: arguments in, exit code out.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use bulkhead_supervisor::args::{Args, Command, LogFormat};
use bulkhead_supervisor::observe::logging;
use bulkhead_supervisor::{config, doctor, keeper, supervisor};
use clap::Parser;

/// Invalid arguments or configuration.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == keeper::KEEPER_ARGUMENT) {
        keeper::run_as_keeper();
    }
    let args = Args::parse();
    match (&args.command, &args.config) {
        (Some(Command::Doctor { json }), _) => {
            let _ = doctor::run(*json, &mut std::io::stdout()); // A closed standard output leaves nobody to tell.
            ExitCode::SUCCESS
        }
        (None, Some(config)) => run(&args, config),
        (None, None) if args.schema => {
            let _ = writeln!(std::io::stdout(), "{:#}", config::json_schema()); // As above.
            ExitCode::SUCCESS
        }
        (None, None) => ExitCode::from(USAGE), // Refused with a message when the arguments were read.
    }
}

fn run(args: &Args, config: &Path) -> ExitCode {
    let config = match config::load(config) {
        Ok(config) => config,
        Err(errors) => {
            // A closed standard error leaves nobody to tell.
            let _ = writeln!(std::io::stderr(), "{}", errors.render(std::io::stderr().is_terminal()));
            return ExitCode::from(USAGE);
        }
    };
    if args.check {
        let _ = write!(std::io::stdout(), "{}", config.summary());
        return ExitCode::SUCCESS;
    }
    let format = match args.log_format {
        LogFormat::Text => logging::LogFormat::Text,
        LogFormat::Json => logging::LogFormat::Json,
    };
    if let Err(error) = logging::init(format, &args.log_level) {
        let _ = writeln!(std::io::stderr(), "error: {error}");
        return ExitCode::from(USAGE);
    }
    match supervisor::run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
