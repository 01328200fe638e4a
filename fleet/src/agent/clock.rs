//! Estimates the time on the NATS server's clock, because deadlines count from the time when the server stored the job.
//! `presence` takes the measurements, and `runner` applies the deadlines. The server's time is kept relative to the
//! time since boot. A step of the host's clock therefore has no effect on deadlines.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use crate::decide::Timestamp;

/// The server's clock, stored as an offset from the time since the host was booted.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// Server's time minus the time since boot, in microseconds.
    offset_micros: AtomicI64,
    is_measured: AtomicBool,
}

impl Clock {
    /// Returns the current time according to the server's clock.
    pub(crate) fn now(&self) -> Timestamp {
        let offset = self.offset_micros.load(Ordering::Relaxed);
        let since_boot = time_since_boot();
        match offset >= 0 {
            true => since_boot + Duration::from_micros(offset.unsigned_abs()),
            false => since_boot.saturating_sub(Duration::from_micros(offset.unsigned_abs())),
        }
    }

    /// Measures the offset of the server's clock. `stored` is the server's time at which a message was stored. `before`
    /// and `after` are the values of [`time_since_boot`] before and after the request.
    pub(crate) fn measure(&self, before: Duration, stored: Timestamp, after: Duration) {
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let own = micros(before) / 2 + micros(after) / 2;
        self.offset_micros.store(micros(stored) - own, Ordering::Relaxed);
        self.is_measured.store(true, Ordering::Release);
    }

    /// Returns true once the offset of the server's clock has been measured.
    pub(crate) fn is_measured(&self) -> bool {
        self.is_measured.load(Ordering::Acquire)
    }

    /// Returns the time on the server's clock minus the time on the host's clock, in seconds. Returns 0 until the
    /// server's clock has been measured.
    pub(crate) fn offset_seconds(&self) -> f64 {
        if !self.is_measured() {
            return 0.0;
        }
        let host = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now().as_secs_f64() - host.as_secs_f64()
    }
}

/// Returns the time since the host was booted, including the time for which the host was suspended.
pub(crate) fn time_since_boot() -> Duration {
    // The kernel never returns a negative time.
    clock_gettime(ClockId::Boottime).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibrated_clock_follows_the_time_since_boot() {
        let clock = Clock::default();
        assert_eq!((clock.is_measured(), clock.offset_seconds()), (false, 0.0));
        let measured = time_since_boot();
        for server in [Duration::from_secs(1_800_000_000), Duration::ZERO] {
            clock.measure(measured, server, measured);
            // Any amount of time can pass between two readings of the clock.
            let [before, now, after] = [time_since_boot(), clock.now(), time_since_boot()];
            let expected = |time: Duration| time - measured + server;
            let rounding = Duration::from_micros(2);
            assert!((expected(before)..=expected(after) + rounding).contains(&now), "{now:?}");
        }
    }

    #[test]
    fn offset_is_relative_to_the_host_clock() {
        let clock = Clock::default();
        for ahead in [60.0, -60.0] {
            let (host, measured) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap(), time_since_boot());
            clock.measure(measured, Duration::from_secs_f64(host.as_secs_f64() + ahead), measured);
            assert!((clock.offset_seconds() - ahead).abs() < 30.0, "{}", clock.offset_seconds());
        }
    }
}
