//! Receives the payload of a job over HTTP, and sends the payload to the data plane. A payload of known length is
//! passed on while it arrives, and any other payload is first collected in memory. `max_buffered` limits this memory,
//! and the data plane decides when memory must be freed. `jobs` sets the time limit.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{HeaderMap, header};
use bulkhead_config::Config;
use bulkhead_plane::counters::{SharedCounters, SpoolCounters};
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_CEILING};
use futures_util::stream::StreamExt;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;

use super::Failure;

/// Size of the memory segments that hold a payload of unknown length, in bytes.
const SEGMENT_BYTES: usize = 256 * 1024;

/// Size that is announced for a payload that will not be sent, in bytes. Every bulkhead rejects it. The data plane would
/// wait for the payload if a reload had just raised the bulkhead's `max_payload` to the announced size.
const WITHHELD_BYTES: u64 = PAYLOAD_BYTES_CEILING + 1;

/// An incoming payload.
pub(super) struct Upload {
    body: BodyDataStream,
    pub(super) length: Length,
    /// Maximum payload size of the bulkhead (`max_payload`). During an upgrade, the highest size that can be encoded,
    /// because the successor checks the size. `None` if the bulkhead does not exist.
    pub(super) max_bytes: Option<u64>,
    spool: Spool,
}

pub(super) enum Length {
    Known(u64),
    /// The client did not announce the payload's length. It is unknown until the last chunk has arrived.
    Unknown,
}

/// Payload size that is announced to the data plane, in bytes. Each variant corresponds to one way of sending the
/// payload.
pub(super) enum Announced {
    /// The payload is sent to the data plane while it is still being received.
    Streamed(u64),
    /// The complete payload is in memory.
    Spooled(u64),
    /// The payload will not be sent, because it is too large or the bulkhead does not exist. The data plane rejects the
    /// job because of the announced size, or for a reason that it checks first.
    Withheld,
}

impl Announced {
    pub(super) fn bytes(&self) -> u64 {
        match *self {
            Self::Streamed(bytes) | Self::Spooled(bytes) => bytes,
            Self::Withheld => WITHHELD_BYTES,
        }
    }
}

impl Upload {
    pub(super) fn new(
        config: &Config,
        (counters, owner): (Arc<SharedCounters>, Arc<SpoolCounters>),
        max_bytes: Option<u64>,
        headers: &HeaderMap,
        body: Body,
    ) -> Self {
        let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let length = match length {
            Some(length) if !headers.contains_key(header::TRANSFER_ENCODING) => Length::Known(length),
            _ if headers.contains_key(header::TRANSFER_ENCODING) => Length::Unknown,
            _ => Length::Known(0),
        };
        let capacity = DataPlaneLimits::new(&config.supervisor).buffered_bytes_max;
        Self {
            body: body.into_data_stream(),
            length,
            max_bytes,
            spool: Spool::new(counters, owner, capacity),
        }
    }

    /// Determines the size of the payload. If the client sends the payload in chunks, receives all of them first.
    pub(super) async fn announce(&mut self) -> Result<Announced, Failure> {
        let max = match (&self.length, self.max_bytes) {
            (Length::Known(bytes), Some(max)) if *bytes > max => return Ok(Announced::Withheld),
            (Length::Known(bytes), Some(_)) => return Ok(Announced::Streamed(*bytes)),
            // A reload can add the bulkhead at any moment, so small payloads are left to the data plane to reject.
            (Length::Known(bytes), None) if *bytes <= INLINE_PAYLOAD_BYTES_MAX as u64 => {
                return Ok(Announced::Streamed(*bytes));
            }
            (_, None) => return Ok(Announced::Withheld),
            (Length::Unknown, Some(max)) => max,
        };
        let owner = self.spool.owner.clone();
        loop {
            let memory_needed = owner.free_requested.notified();
            let chunk = tokio::select! {
                chunk = next_chunk(&mut self.body) => chunk?,
                () = memory_needed => {
                    self.spool.check_memory_pressure()?;
                    continue;
                }
            };
            let Some(chunk) = chunk else { break };
            if self.spool.bytes as u64 + chunk.len() as u64 > max {
                return Ok(Announced::Withheld);
            }
            self.spool.add(&chunk)?;
        }
        Ok(Announced::Spooled(self.spool.bytes as u64))
    }

    /// Sends the SUBMIT frame of a job, and then the payload unless it is withheld.
    pub(super) async fn send(
        &mut self,
        mut frame: Vec<u8>,
        announced: &Announced,
        socket: &mut OwnedWriteHalf,
    ) -> Result<(), Failure> {
        let mut left = 0;
        if let Announced::Streamed(bytes) = *announced {
            left = bytes;
            // A small payload is sent with the frame in a single write. A large payload is sent separately, because the
            // data plane must accept the job first.
            if (1..=INLINE_PAYLOAD_BYTES_MAX as u64).contains(&bytes) {
                frame.extend_from_slice(&self.next_chunk(&mut left).await?);
            }
        }
        // Counted by the data plane as soon as it has read the frame, and must not count twice.
        let is_spooled = matches!(announced, Announced::Spooled(_));
        let segments = is_spooled.then(|| self.spool.take_segments());
        // If the write fails, the data plane's reply contains the reason.
        socket.write_all(&frame).await.map_err(|_| Failure::Dropped)?;
        match *announced {
            // The caller waits for the rejection at the same time.
            Announced::Withheld => std::future::pending().await,
            Announced::Spooled(_) => {
                for segment in segments.into_iter().flatten() {
                    socket.write_all(&segment).await.map_err(|_| Failure::Dropped)?;
                }
            }
            Announced::Streamed(_) => {
                while left > 0 {
                    let chunk = self.next_chunk(&mut left).await?;
                    socket.write_all(&chunk).await.map_err(|_| Failure::Dropped)?;
                }
            }
        }
        Ok(())
    }

    /// Receives the next bytes of a payload. `left` is the number of bytes still to be received.
    async fn next_chunk(&mut self, left: &mut u64) -> Result<Bytes, Failure> {
        let chunk = next_chunk(&mut self.body).await?.ok_or(Failure::Broken)?;
        *left = left.checked_sub(chunk.len() as u64).ok_or(Failure::Broken)?;
        Ok(chunk)
    }
}

async fn next_chunk(body: &mut BodyDataStream) -> Result<Option<Bytes>, Failure> {
    match body.next().await {
        Some(Ok(chunk)) => Ok(Some(chunk)),
        Some(Err(_)) => Err(Failure::Broken),
        None => Ok(None),
    }
}

/// A payload of unknown length, kept in memory while it is being received. Its size counts towards `max_buffered`.
struct Spool {
    segments: Vec<Vec<u8>>,
    bytes: usize,
    /// Number of bytes of this payload that are currently included in the counters.
    charged: usize,
    counters: Arc<SharedCounters>,
    /// Counters for the user or token that is sending the payload.
    owner: Arc<SpoolCounters>,
    capacity: usize,
}

impl Spool {
    fn new(counters: Arc<SharedCounters>, owner: Arc<SpoolCounters>, capacity: usize) -> Self {
        Self { segments: Vec::new(), bytes: 0, charged: 0, counters, owner, capacity }
    }

    /// Adds a chunk to the payload. The chunk is copied, because a small chunk can keep a large buffer alive.
    fn add(&mut self, mut chunk: &[u8]) -> Result<(), Failure> {
        while !chunk.is_empty() {
            let room = self.segments.last().map_or(0, |last| SEGMENT_BYTES - last.len());
            if room == 0 {
                self.charge(SEGMENT_BYTES)?;
                self.segments.push(Vec::with_capacity(SEGMENT_BYTES));
                continue;
            }
            let (now, later) = chunk.split_at(chunk.len().min(room));
            if let Some(last) = self.segments.last_mut() {
                last.extend_from_slice(now);
            }
            self.bytes += now.len();
            chunk = later;
        }
        Ok(())
    }

    fn charge(&mut self, more: usize) -> Result<(), Failure> {
        self.check_memory_pressure()?;
        self.charged += more;
        let spooled = self.counters.spooled.fetch_add(more, Ordering::Relaxed) + more;
        let held = self.owner.held.fetch_add(more, Ordering::Relaxed) + more;
        let total = spooled.saturating_add(self.counters.buffered.load(Ordering::Relaxed));
        if total > self.capacity && held > self.counters.spool_share.load(Ordering::Relaxed) {
            return Err(self.memory_full());
        }
        Ok(())
    }

    /// Returns an error if the data plane has asked for memory to be freed, in which case this payload must be dropped.
    /// Does nothing once enough memory has been freed by dropping other payloads.
    fn check_memory_pressure(&self) -> Result<(), Failure> {
        let take = |unwanted: usize| (unwanted > 0).then(|| unwanted.saturating_sub(self.charged));
        let unwanted = &self.owner.bytes_to_free;
        match self.charged > 0 && unwanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            true => Err(self.memory_full()),
            false => Ok(()),
        }
    }

    fn memory_full(&self) -> Failure {
        Failure::Overloaded(format!(
            "max_buffered ({} bytes) has been reached: submit fewer jobs at once, or raise the limit",
            self.capacity
        ))
    }

    /// Returns all segments. Stops counting their bytes, because the data plane counts them from now on.
    fn take_segments(&mut self) -> impl Iterator<Item = Vec<u8>> + use<> {
        self.release();
        std::mem::take(&mut self.segments).into_iter()
    }

    fn release(&mut self) {
        let charged = std::mem::take(&mut self.charged);
        self.counters.spooled.fetch_sub(charged, Ordering::Relaxed);
        if charged > 0 && self.owner.held.fetch_sub(charged, Ordering::Relaxed) == charged {
            // This user or token no longer holds any payload that could be freed.
            self.owner.bytes_to_free.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    async fn announced(max_bytes: Option<u64>, header: (&'static str, &str), body: Body) -> u64 {
        let text = "[supervisor]\nsocket = 'jobs.sock'\n[bulkhead.a]\nexec = ['cat']\n";
        let config = bulkhead_config::parse(text, Path::new("/workers.toml")).unwrap();
        let headers = [header].map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let mut upload =
            Upload::new(&config, Default::default(), max_bytes, &headers.into_iter().collect(), body);
        upload.announce().await.ok().unwrap().bytes()
    }

    #[tokio::test]
    async fn no_bulkhead_accepts_the_size_of_a_withheld_payload() {
        let length = async |max, bytes: u64| {
            let body = Body::from_stream(futures_util::stream::pending::<std::io::Result<Bytes>>());
            announced(max, ("content-length", &bytes.to_string()), body).await
        };
        let chunked = async |max, body: Body| announced(max, ("transfer-encoding", "chunked"), body).await;
        let small = INLINE_PAYLOAD_BYTES_MAX as u64;
        // The client of an unknown bulkhead can be faster than the reload that adds the bulkhead.
        assert_eq!((length(None, 1).await, length(None, small).await), (1, small));
        assert_eq!((length(Some(9), 9).await, chunked(Some(9), Body::from("123456789")).await), (9, 9));
        let endless = || Body::from_stream(futures_util::stream::pending::<std::io::Result<Bytes>>());
        for withheld in [
            length(None, small + 1).await,
            length(Some(9), 10).await,
            length(Some(small), small + 1).await,
            length(Some(PAYLOAD_BYTES_CEILING), u64::MAX).await,
            chunked(None, endless()).await,
            chunked(Some(9), Body::from("1234567890")).await,
        ] {
            assert!(withheld > PAYLOAD_BYTES_CEILING, "{withheld}");
        }
    }

    #[test]
    fn spooled_payload_counts_as_memory_until_dropped() {
        let counters = Arc::new(SharedCounters::default());
        let owner = Arc::new(SpoolCounters::default());
        let mut spool = Spool::new(counters.clone(), owner.clone(), 3 * SEGMENT_BYTES);
        let payload: Vec<u8> = (0..2 * SEGMENT_BYTES + 5).map(|i| i as u8).collect();
        for piece in payload.chunks(1000) {
            assert!(spool.add(piece).is_ok());
        }
        assert_eq!(counters.spooled.load(Ordering::Relaxed), 3 * SEGMENT_BYTES);
        assert!(matches!(spool.add(&payload), Err(Failure::Overloaded(_))));
        drop(spool);
        assert_eq!(counters.spooled.load(Ordering::Relaxed), 0);

        let mut spool = Spool::new(counters.clone(), owner.clone(), 3 * SEGMENT_BYTES);
        assert!(spool.add(&payload).is_ok());
        let segments = spool.take_segments();
        assert_eq!(counters.spooled.load(Ordering::Relaxed), 0);
        assert_eq!(segments.flatten().collect::<Vec<u8>>(), payload);
    }
}
