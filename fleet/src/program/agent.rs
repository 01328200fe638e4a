//! Implements `bulkhead-fleet agent`, which runs the agent for this host until a signal arrives. With `--check`, only
//! prints the effective settings. The first signal drains the agent, and a second signal ends the program at once.
//! `agent.rs` of the library does the work.

use bulkhead_fleet::agent::{self, AgentError};
use bulkhead_fleet::settings::Settings;
use bulkhead_linux::blocking::Blocking;
use std::io::IsTerminal;

use tokio::signal::unix::{SignalKind, signal};

use super::args;
use super::output::{self, Failure, exit};

/// Runs the command.
pub(crate) async fn run(settings: Settings, options: &args::Agent) -> Result<u8, Failure> {
    if options.check {
        output::raw(settings.to_toml().as_bytes())?;
        output::line("# ok")?;
        return Ok(exit::OK);
    }
    if settings.bulkhead.is_empty() {
        let message =
            "no bulkheads are configured, so the agent has nothing to do: add a [bulkhead.NAME] table";
        return Err(Failure::new(exit::USAGE, message));
    }
    start_log();
    let fail =
        |error: std::io::Error| Failure::new(exit::FAILED, format!("failed to handle signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = agent::run(settings, bulkhead_fleet::Faults::default(), async {
        // The sender is dropped as the signal to stop, so an error is expected.
        let _ = stopped.await;
    });
    let mut running = std::pin::pin!(running);
    let result = tokio::select! {
        result = &mut running => result,
        _ = terminate.recv() => stop_with(stop, running, &mut terminate, &mut interrupt).await,
        _ = interrupt.recv() => stop_with(stop, running, &mut terminate, &mut interrupt).await,
    };
    result.map(|()| exit::OK).map_err(|error| match error {
        AgentError::Connect(_) => Failure::unreachable(error),
        AgentError::TaskEnded(_) => Failure::new(exit::FAILED, error.to_string()),
        AgentError::NotPrepared(_) | AgentError::Listen(..) => Failure::new(exit::USAGE, error.to_string()),
    })
}

/// Tells the agent to drain, and waits until the agent has stopped. Returns early if another signal arrives.
async fn stop_with(
    stop: tokio::sync::oneshot::Sender<()>,
    running: std::pin::Pin<&mut impl Future<Output = Result<(), AgentError>>>,
    terminate: &mut tokio::signal::unix::Signal,
    interrupt: &mut tokio::signal::unix::Signal,
) -> Result<(), AgentError> {
    drop(stop);
    tokio::select! {
        result = running => result,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,async_nats=error"));
    // This fails only in tests, which install their own subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(|| Blocking(std::io::stderr()))
        // A failed write must not end the agent. By default, the library reports the failure with `eprintln!`, which
        // panics if standard error is full or closed.
        .log_internal_errors(false)
        .try_init();
}
