//! `bulkhead top`: a live, full-screen `status`. One task owns the screen and handles keys, samples and
//! signals sequentially. Sampling runs concurrently, so that keys do not wait for a slow supervisor.

mod app;
mod columns;
mod detail;
mod draw;
mod events;
mod pieces;
mod plain;
mod sample;
mod terminal;
mod words;

use std::io::IsTerminal;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use crate::args::{Args, Top};
use crate::output::{Failure, exit};
use app::{App, Step};
use sample::{Sample, Watcher};
use terminal::{Heard, Screen, Signals};

/// Maximum time for one sample.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

/// Interval for updating the displayed duration of a supervisor's silence.
const TICK: Duration = Duration::from_secs(1);

type Looked = Result<Sample, Failure>;

pub(crate) async fn run(args: &Args, top: &Top) -> Result<u8, Failure> {
    if args.json || top.once {
        return plain::run(args, top.interval).await;
    }
    if !std::io::stdout().is_terminal() || std::env::var("TERM").is_ok_and(|kind| kind == "dumb") {
        let message = "failed to start the live display: standard output is not a suitable terminal; \
                       use `bulkhead status`, or `bulkhead top --once`";
        return Err(Failure::new(exit::USAGE, message));
    }
    let mut watcher = Watcher::new(args);
    let first = look(&mut watcher).await?;
    let app = App::new(first, top.interval, args.admin().display().to_string());
    live(watcher, app, top.interval).await
}

async fn look(watcher: &mut Watcher<'_>) -> Looked {
    let admin = watcher.admin();
    tokio::time::timeout(LOOK_WITHIN, watcher.look()).await.unwrap_or_else(|_| {
        let silence = format!("no answer within {} s", LOOK_WITHIN.as_secs());
        Err(crate::admin::unreachable(&admin, &silence))
    })
}

/// Takes samples periodically, except while paused, until the screen is closed.
async fn watch(
    mut watcher: Watcher<'_>,
    interval: Duration,
    seen: mpsc::Sender<Looked>,
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
        let looked = look(&mut watcher).await;
        if seen.send(looked).await.is_err() {
            return;
        }
    }
}

async fn live(watcher: Watcher<'_>, mut app: App, interval: Duration) -> Result<u8, Failure> {
    let fail =
        |error: std::io::Error| Failure::new(exit::FAILED, format!("failed to use the terminal: {error}"));
    let mut signals = Signals::new().map_err(fail)?;
    let mut screen = Screen::enter().map_err(fail)?;
    let mut keys = terminal::keys().map_err(fail)?;
    // Capacity 1, so that sampling stops while the screen is not drawn.
    let (seen, mut looks) = mpsc::channel(1);
    let (pause, is_paused) = watch::channel(false);
    let mut watching = pin!(watch(watcher, interval, seen, is_paused));
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        screen.show(&mut app, Instant::now()).map_err(fail)?;
        let step = tokio::select! {
            key = keys.recv() => match key {
                Some(key) => app.press(key.map_err(fail)?, Instant::now()),
                None => Step::Leave(exit::FAILED),
            },
            Some(looked) = looks.recv() => app.take(looked),
            () = &mut watching => Step::Leave(exit::FAILED),
            heard = signals.next() => match heard {
                Heard::End(code) => Step::Leave(code),
                Heard::Stop if !terminal::may_stop() => Step::Stay,
                Heard::Stop => {
                    screen.leave();
                    terminal::stop();
                    Step::Stay
                }
                Heard::Continue => {
                    screen.enter_again().map_err(fail)?;
                    Step::Stay
                }
            },
            _ = ticks.tick() => Step::Stay,
        };
        match step {
            Step::Stay => {}
            Step::Leave(code) => return Ok(code),
            Step::Suspend => terminal::ask_for_stop(),
        }
        pause.send_if_modified(|is_paused| std::mem::replace(is_paused, app.is_paused()) != app.is_paused());
    }
}
