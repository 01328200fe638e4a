//! The terminal: taken when the screen begins, and given back on every way out, a panic included. What comes
//! from it, and the signals that concern it.

use std::io::{self, BufWriter, Stdout, stdout};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::{Position, Rect};
use rustix::process::{Signal as Number, getpid, getsid, kill_current_process_group, kill_process};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::app::App;
use super::draw;

/// Keys that were pressed and not looked at yet; more stay with the terminal.
const KEYS_MAX: usize = 64;

/// Bytes of a frame that are written at once.
const FRAME_BYTES: usize = 64 << 10;

/// Whether the terminal is ours at present. There is one for the process, and a panic must find it.
static IS_OURS: AtomicBool = AtomicBool::new(false);

/// The full screen, which is given back when this is dropped.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Stdout>>>,
}

impl Screen {
    pub(super) fn enter() -> io::Result<Self> {
        restore_on_panic();
        take()?;
        let backend = CrosstermBackend::new(BufWriter::with_capacity(FRAME_BYTES, stdout()));
        let terminal = Terminal::new(backend).inspect_err(|_| give_back())?;
        Ok(Self { terminal })
    }

    /// Draws, unless the terminal belongs to another process at present.
    pub(super) fn show(&mut self, app: &mut App, now: Instant) -> io::Result<()> {
        if !IS_OURS.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.terminal.draw(|frame| draw::draw(frame.buffer_mut(), app, now))?;
        Ok(())
    }

    pub(super) fn leave(&mut self) {
        give_back();
    }

    /// After a pause in which others may have used the terminal.
    pub(super) fn enter_again(&mut self) -> io::Result<()> {
        give_back();
        take()?;
        // Not `clear`, which asks the terminal for its cursor, and whose answer the thread with the keys gets.
        let size = self.terminal.size()?;
        self.terminal.resize(Rect::from((Position::ORIGIN, size)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn take() -> io::Result<()> {
    IS_OURS.store(true, Ordering::SeqCst);
    enable_raw_mode()
        .and_then(|()| execute!(stdout(), EnterAlternateScreen, Hide))
        .inspect_err(|_| give_back())
}

fn give_back() {
    if IS_OURS.swap(false, Ordering::SeqCst) {
        // The terminal may be gone, and then it is not missed.
        let _ = execute!(stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}

fn restore_on_panic() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
    });
}

/// What comes from the terminal, read by a thread of its own; it ends with the process.
pub(super) fn keys() -> io::Result<mpsc::Receiver<io::Result<Event>>> {
    let (sender, receiver) = mpsc::channel(KEYS_MAX);
    let read = move || {
        loop {
            let event = event::read();
            let is_over = event.is_err();
            if sender.blocking_send(event).is_err() || is_over {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(receiver)
}

/// What signals ask for.
pub(super) enum Heard {
    /// An end with this exit status.
    End(u8),
    Stop,
    Continue,
}

/// The signals that end or stop a program with a screen.
pub(super) struct Signals {
    hangup: Signal,
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    stop: Signal,
    resume: Signal,
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            stop: signal(SignalKind::from_raw(Number::TSTP.as_raw()))?,
            resume: signal(SignalKind::from_raw(Number::CONT.as_raw()))?,
        })
    }

    pub(super) async fn next(&mut self) -> Heard {
        tokio::select! {
            _ = self.hangup.recv() => ended_by(Number::HUP),
            _ = self.interrupt.recv() => ended_by(Number::INT),
            _ = self.quit.recv() => ended_by(Number::QUIT),
            _ = self.terminate.recv() => ended_by(Number::TERM),
            _ = self.stop.recv() => Heard::Stop,
            _ = self.resume.recv() => Heard::Continue,
        }
    }
}

/// As shells tell it.
fn ended_by(signal: Number) -> Heard {
    Heard::End(u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX))
}

/// Whether a parent could have this process go on: a shell that knows of jobs. Where there is none, the first
/// process of the session is ours.
pub(super) fn may_stop() -> bool {
    getsid(None).is_ok_and(|session| session != getpid())
}

/// Asks for a stop of all that run beside this process, as the terminal does for ^Z outside of raw mode.
pub(super) fn ask_for_stop() {
    if may_stop() {
        // A group of our own is there as long as we are.
        let _ = kill_current_process_group(Number::TSTP);
    }
}

/// Stops this process until it is continued.
pub(super) fn stop() {
    // No process is forbidden to stop itself.
    let _ = kill_process(getpid(), Number::STOP);
}
