//! The `bulkhead-supervisor` program. Parses arguments, loads and checks the configuration, runs the requested command,
//! and returns the exit code. `supervisor::run` starts the supervisor, and the other commands start none.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bulkhead_linux::blocking::Blocking;
use bulkhead_linux::liveness::LivenessDescriptor;
use bulkhead_linux::{signals, standard_output};
use bulkhead_supervisor::args::{Args, Command, LogFormat, LogOutput};
use bulkhead_supervisor::observe::logging;
use bulkhead_supervisor::own_folder::OwnFolder;
use bulkhead_supervisor::take_over::Link;
use bulkhead_supervisor::{check, config, doctor, pages, supervisor};
use clap::Parser;

/// Exit code when the supervisor could not be started or has failed.
const FAILED: u8 = 1;

/// Exit code for invalid arguments or an invalid configuration.
const USAGE: u8 = 2;

/// Exit code for a failed write to standard output: `EX_IOERR` from sysexits.h. The `bulkhead` command uses the
/// same code.
const OUTPUT_FAILED: u8 = 74;

fn main() -> ExitCode {
    bulkhead_supervisor::run_hidden_mode();
    signals::restore_default_sigchld();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return print_clap_message(&error),
    };
    match &args.command {
        Some(Command::Doctor { json }) => {
            exit_code_after_write(standard_output::get().and_then(|mut out| doctor::run(*json, &mut out)))
        }
        Some(Command::Man { folder }) => write_pages(folder),
        None if args.schema => print(&format!("{:#}\n", config::json_schema())),
        None => match config_path(&args) {
            Ok(config) => run(&args, &config),
            Err(error) => fail_with(USAGE, &error),
        },
    }
}

/// Prints the error or help text returned by clap.
fn print_clap_message(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        error.exit();
    }
    exit_code_after_write(standard_output::get().and_then(|_| error.print()))
}

/// Returns the path given on the command line, or the default path. Fails if the default path does not exist, because
/// the general error for a missing file does not say where the path comes from.
fn config_path(args: &Args) -> Result<PathBuf, String> {
    if let Some(path) = &args.config {
        return Ok(path.clone());
    }
    let Some(path) = config::default_path() else {
        return Err(
            "there is no default configuration file because neither XDG_CONFIG_HOME nor HOME is set; \
                    pass --config FILE"
                .to_owned(),
        );
    };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!(
            "there is no configuration file {}; write the file, or pass --config FILE",
            path.display()
        )),
        _ => Ok(path),
    }
}

/// Writes man pages, and prints their paths.
fn write_pages(folder: &Path) -> ExitCode {
    match pages::write(folder) {
        Ok(files) => print(&files.iter().map(|file| format!("{}\n", file.display())).collect::<String>()),
        Err(error) => {
            let problem = format!("failed to write man pages to {}: {error}", folder.display());
            fail_with(OUTPUT_FAILED, &problem)
        }
    }
}

fn print(text: &str) -> ExitCode {
    exit_code_after_write(standard_output::get().and_then(|mut out| out.write_all(text.as_bytes())))
}

/// Converts the result of writing to standard output into an exit code. A pipe that the reader has closed early is not
/// an error.
fn exit_code_after_write(written: io::Result<()>) -> ExitCode {
    match written.and_then(|()| Blocking(io::stdout()).flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            fail_with(OUTPUT_FAILED, &format!("failed to write to standard output: {error}"))
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Checks the configuration by starting one worker for each bulkhead. Prints successes to standard output and failures
/// to standard error.
fn check_and_start(config: &config::Config) -> ExitCode {
    let opened = standard_output::get().and_then(|mut out| {
        write!(out, "{}", config.summary_where(check::worker_ids(config)))?;
        Ok(out)
    });
    let mut out = match opened {
        Ok(out) => out,
        Err(error) => return exit_code_after_write(Err(error)),
    };
    let failures = check::start_each(config, &mut out).unwrap_or_else(|error| vec![error.to_string()]);
    for failure in &failures {
        fail_with(USAGE, failure);
    }
    if !failures.is_empty() {
        return ExitCode::from(USAGE);
    }
    exit_code_after_write(writeln!(
        out,
        "# ok: the configuration is valid, and a worker of each bulkhead starts"
    ))
}

fn run(args: &Args, config: &Path) -> ExitCode {
    if !args.check
        && let Err(error) = supervisor::defer_signals()
    {
        return fail_with(FAILED, &error);
    }
    let while_open = match args.while_open.map(LivenessDescriptor::inherit).transpose() {
        Ok(while_open) => while_open,
        Err(error) => return fail_with(USAGE, &format!("--while-open: {error}")),
    };
    let link = match args.take_over.map(Link::inherit).transpose() {
        Ok(link) => link,
        Err(error) => return fail_with(USAGE, &format!("--take-over: {error}")),
    };
    // The folder is removed when this function returns, whatever the reason.
    let _own_folder = match args.own_folder.as_deref().map(OwnFolder::open).transpose() {
        Ok(folder) => folder,
        Err(error) => return fail_with(USAGE, &format!("--own-folder: {error}")),
    };
    if let Err(error) = logging::check_level(&args.log_level) {
        return fail_with(USAGE, &error);
    }
    let config = match config::load(config) {
        Ok(config) => config,
        Err(errors) => {
            if let Some(link) = link {
                link.fail(&errors.render(false).to_string());
            }
            // Ignores write errors, because there is no other place to report them.
            let _ = writeln!(Blocking(io::stderr()), "{}", errors.render(io::stderr().is_terminal()));
            return ExitCode::from(USAGE);
        }
    };
    if args.check && args.start {
        return check_and_start(&config);
    }
    if args.check {
        let summary = config.summary_where(check::worker_ids(&config));
        return print(&format!("{summary}\n# ok: the configuration is valid\n"));
    }
    let format = match args.log_format {
        LogFormat::Text => logging::LogFormat::Text,
        LogFormat::Json => logging::LogFormat::Json,
    };
    let log_filter =
        logging::LogFilter { level: &args.log_level, has_output: args.log_output == LogOutput::On };
    if let Err(error) = logging::init(format, log_filter) {
        return fail_with(USAGE, &error);
    }
    supervisor::run(config, while_open, link)
        .map_or_else(|error| fail_with(FAILED, &error), |()| ExitCode::SUCCESS)
}

/// Prints an error to standard error, and returns the exit code. Ignores write errors.
fn fail_with(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    let _ = writeln!(Blocking(io::stderr()), "error: {error}");
    ExitCode::from(code)
}
