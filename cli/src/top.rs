//! Implements `bulkhead top`, a live, full-screen `status`. One task owns the screen and handles keys, samples and
//! signals sequentially. Sampling runs concurrently, so that key presses do not have to wait for a slow supervisor.

mod app;
mod columns;
mod detail;
mod draw;
mod events;
mod plain;
mod sample;
mod terminal;
mod text;
mod widgets;

use std::io::IsTerminal;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use crate::args::{Args, Top};
use crate::output::{Failure, exit};
use app::{App, Step};
use sample::{Sample, Sampler};
use terminal::{Screen, SignalAction, Signals};

const SAMPLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval at which the screen is redrawn even without a new sample, because the screen shows the time since the
/// last response.
const TICK: Duration = Duration::from_secs(1);

type SampleResult = Result<Sample, Failure>;

pub(crate) async fn run(args: &Args, top: &Top) -> Result<u8, Failure> {
    if args.json || top.once {
        return plain::run(args, top.interval).await;
    }
    if !std::io::stdout().is_terminal() || std::env::var("TERM").is_ok_and(|kind| kind == "dumb") {
        let message = "failed to start the live display: standard output is not a suitable terminal; \
                       use `bulkhead status`, or `bulkhead top --once`";
        return Err(Failure::new(exit::USAGE, message));
    }
    let mut sampler = Sampler::new(args);
    let first = sample(&mut sampler).await?;
    let app = App::new(first, top.interval, args.target()?.to_string());
    run_live(sampler, app, top.interval).await
}

async fn sample(sampler: &mut Sampler<'_>) -> SampleResult {
    let target = sampler.target()?;
    tokio::time::timeout(SAMPLE_TIMEOUT, sampler.sample()).await.unwrap_or_else(|_| {
        let silence = format!("the supervisor did not respond within {} s", SAMPLE_TIMEOUT.as_secs());
        Err(crate::requests::unreachable(&target, &silence))
    })
}

/// Takes samples periodically, except while paused, until the screen is closed.
async fn sample_periodically(
    mut sampler: Sampler<'_>,
    interval: Duration,
    sender: mpsc::Sender<SampleResult>,
    mut pause: watch::Receiver<bool>,
) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        if pause.wait_for(|is_paused| !is_paused).await.is_err() {
            return;
        }
        let result = sample(&mut sampler).await;
        if sender.send(result).await.is_err() {
            return;
        }
    }
}

async fn run_live(sampler: Sampler<'_>, mut app: App, interval: Duration) -> Result<u8, Failure> {
    let fail =
        |error: std::io::Error| Failure::new(exit::FAILED, format!("failed to use the terminal: {error}"));
    let mut signals = Signals::new().map_err(fail)?;
    let mut screen = Screen::enter().map_err(fail)?;
    let mut keys = terminal::keys().map_err(fail)?;
    // With a capacity of 1, sampling pauses while the screen is not being drawn.
    let (sender, mut samples) = mpsc::channel(1);
    let (pause, is_paused) = watch::channel(false);
    let mut sampling = pin!(sample_periodically(sampler, interval, sender, is_paused));
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        screen.show(&mut app, Instant::now()).map_err(fail)?;
        let step = tokio::select! {
            key = keys.recv() => match key {
                Some(key) => app.press(key.map_err(fail)?, Instant::now()),
                None => Step::Leave(exit::FAILED),
            },
            Some(result) = samples.recv() => app.store(result),
            () = &mut sampling => Step::Leave(exit::FAILED),
            action = signals.next() => match action {
                SignalAction::End(code) => Step::Leave(code),
                SignalAction::Stop if !terminal::can_suspend() => Step::Stay,
                SignalAction::Stop => {
                    screen.leave();
                    terminal::suspend();
                    Step::Stay
                }
                SignalAction::Continue => {
                    screen.reenter().map_err(fail)?;
                    Step::Stay
                }
            },
            _ = ticks.tick() => Step::Stay,
        };
        match step {
            Step::Stay => {}
            Step::Leave(code) => return Ok(code),
            Step::Suspend => terminal::request_suspend(),
        }
        pause.send_if_modified(|is_paused| std::mem::replace(is_paused, app.is_paused()) != app.is_paused());
    }
}
