//! Estimates the time on the NATS server's clock. Deadlines count from the time when the server stored the job, so the
//! agent corrects the local clock by the measured offset.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::decide::Timestamp;

/// The local clock and its offset from the server's clock.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// Offset of the server's clock from the local clock, in microseconds. Positive if the server's clock is ahead.
    offset_micros: AtomicI64,
    is_measured: AtomicBool,
}

impl Clock {
    /// Returns the current time according to the server's clock.
    pub(crate) fn now(&self) -> Timestamp {
        let offset = self.offset_micros.load(Ordering::Relaxed);
        let own = own_time();
        match offset >= 0 {
            true => own + Duration::from_micros(offset.unsigned_abs()),
            false => own.saturating_sub(Duration::from_micros(offset.unsigned_abs())),
        }
    }

    /// Measures the offset of the server's clock. The server stored a message at `stored`, which was between the
    /// local times `before` and `after`.
    pub(crate) fn measure(&self, before: Timestamp, stored: Timestamp, after: Timestamp) {
        let micros = |time: Timestamp| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let own = micros(before) / 2 + micros(after) / 2;
        self.offset_micros.store(micros(stored) - own, Ordering::Relaxed);
        self.is_measured.store(true, Ordering::Release);
    }

    /// Returns true once the offset of the server's clock has been measured.
    pub(crate) fn is_measured(&self) -> bool {
        self.is_measured.load(Ordering::Acquire)
    }

    /// Returns the offset of the server's clock in seconds.
    pub(crate) fn offset_seconds(&self) -> f64 {
        self.offset_micros.load(Ordering::Relaxed) as f64 / 1e6
    }
}

/// Returns the current time according to the local clock.
pub(crate) fn own_time() -> Timestamp {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_offset_corrects_the_clock() {
        let clock = Clock::default();
        let own = own_time();
        for ahead in [5, -5] {
            let stored = Duration::from_secs(own.as_secs().saturating_add_signed(ahead));
            clock.measure(own, stored, own);
            // Any time can pass between two readings of the local clock.
            let [before, now, after] = [own_time(), clock.now(), own_time()].map(|time| time.as_secs_f64());
            let ahead = ahead as f64;
            assert!((before + ahead - 1.5..after + ahead + 1.5).contains(&now), "{before} {now} {after}");
        }
    }
}
