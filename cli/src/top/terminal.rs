//! Acquires the terminal when the screen opens, and restores it on every exit, including a panic. Also reads keys and
//! signals, whose effects `app` and `top` decide. `draw` determines the contents of the screen.

use std::io::{self, BufWriter, Stdout, stdout};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bulkhead_linux::blocking::Blocking;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::{Position, Rect};
use ratatui::style::{Color, Style};
use rustix::process::{Signal as Number, getpid, getsid, kill_current_process_group, kill_process};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::app::App;
use super::draw;

/// Maximum number of unhandled key events. Additional input stays in the terminal's buffer.
const KEYS_MAX: usize = 64;

/// Size of the output buffer for a frame, in bytes.
const FRAME_BYTES: usize = 64 << 10;

/// True while this process owns the terminal. The variable is global because the panic hook needs it.
static OWNS_TERMINAL: AtomicBool = AtomicBool::new(false);

/// The full-screen display. Dropping this value restores the terminal.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Blocking<Stdout>>>>,
    /// True if the environment variable `NO_COLOR` is set and not empty.
    is_colourless: bool,
}

impl Screen {
    pub(super) fn enter() -> io::Result<Self> {
        restore_on_panic();
        acquire()?;
        let backend = CrosstermBackend::new(BufWriter::with_capacity(FRAME_BYTES, Blocking(stdout())));
        let terminal = Terminal::new(backend).inspect_err(|_| release())?;
        let is_colourless = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Ok(Self { terminal, is_colourless })
    }

    /// Draws the screen. Does nothing while another process owns the terminal.
    pub(super) fn show(&mut self, app: &mut App, now: Instant) -> io::Result<()> {
        if !OWNS_TERMINAL.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.terminal.draw(|frame| {
            draw::draw(frame.buffer_mut(), app, now);
            if self.is_colourless {
                // Removes all colours, because with `NO_COLOR` crossterm writes each colour as a sequence that resets
                // all attributes of the text.
                let area = frame.area();
                frame.buffer_mut().set_style(area, Style::new().fg(Color::Reset).bg(Color::Reset));
            }
        })?;
        Ok(())
    }

    pub(super) fn leave(&mut self) {
        release();
    }

    /// Reacquires the terminal after this process was suspended. Other programs may have used the terminal in the
    /// meantime.
    pub(super) fn reenter(&mut self) -> io::Result<()> {
        release();
        acquire()?;
        // Does not call `clear`, which would query the cursor position. The keyboard thread would receive the reply.
        let size = self.terminal.size()?;
        self.terminal.resize(Rect::from((Position::ORIGIN, size)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        release();
    }
}

fn acquire() -> io::Result<()> {
    OWNS_TERMINAL.store(true, Ordering::SeqCst);
    enable_raw_mode()
        .and_then(|()| execute!(Blocking(stdout()), EnterAlternateScreen, Hide))
        .inspect_err(|_| release())
}

fn release() {
    if OWNS_TERMINAL.swap(false, Ordering::SeqCst) {
        // This fails only if the terminal is gone.
        let _ = execute!(Blocking(stdout()), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}

fn restore_on_panic() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            release();
            before(panic);
        }));
    });
}

/// Starts a thread that reads events from the terminal. The thread runs until the process exits.
pub(super) fn keys() -> io::Result<mpsc::Receiver<io::Result<Event>>> {
    let (sender, receiver) = mpsc::channel(KEYS_MAX);
    let read = move || {
        loop {
            let event = event::read();
            let has_failed = event.is_err();
            if sender.blocking_send(event).is_err() || has_failed {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(receiver)
}

/// Action requested by a signal.
pub(super) enum SignalAction {
    /// Exit with the given status.
    End(u8),
    Stop,
    Continue,
}

/// Signals that terminate or suspend a full-screen program.
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

    pub(super) async fn next(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.hangup.recv() => exit_after(Number::HUP),
            _ = self.interrupt.recv() => exit_after(Number::INT),
            _ = self.quit.recv() => exit_after(Number::QUIT),
            _ = self.terminate.recv() => exit_after(Number::TERM),
            _ = self.stop.recv() => SignalAction::Stop,
            _ = self.resume.recv() => SignalAction::Continue,
        }
    }
}

/// Returns the exit status that shells report for a process killed by this signal.
fn exit_after(signal: Number) -> SignalAction {
    SignalAction::End(u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX))
}

/// Returns true if a parent process, usually a shell with job control, can resume this process after it has been
/// suspended. A session leader has no such parent.
pub(super) fn can_suspend() -> bool {
    getsid(None).is_ok_and(|session| session != getpid())
}

/// Suspends the foreground process group, as ^Z does when the terminal is not in raw mode.
pub(super) fn request_suspend() {
    if can_suspend() {
        // Cannot fail, because this process is in the group.
        let _ = kill_current_process_group(Number::TSTP);
    }
}

/// Suspends this process until another process resumes it.
pub(super) fn suspend() {
    // Cannot fail, because a process can always stop itself.
    let _ = kill_process(getpid(), Number::STOP);
}
