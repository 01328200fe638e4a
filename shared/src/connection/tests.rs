use super::inbox::{LARGE_BUFFER_BYTES_MIN, LARGE_GROWTH_FACTOR_MAX};
use super::outbox::{METADATA_BYTES_TYPICAL, SPARE_BYTES_MAX, Segment};
use super::pool::{POOL_BYTES_MAX, POOL_OVERSIZE_FACTOR_MAX, POOL_SPARES_MAX};
use super::*;
use crate::frame::{Header, kind};
use crate::worker_protocol::{Empty, Status};
use std::os::unix::net::UnixStream;

struct Owned(Header, Vec<u8>);

fn drain(inbox: &mut Inbox, socket: &UnixStream, scratch: &mut Scratch) -> (Vec<Owned>, Received) {
    let mut found = Vec::new();
    loop {
        let (received, mut batch) = inbox.receive(socket, scratch).unwrap();
        while let Some(item) = batch.next().unwrap() {
            match item {
                Item::Frame { header, payload, .. } => found.push(Owned(header, payload.to_vec())),
                Item::Announced { .. } => batch.accept(Vec::new()),
                Item::Large { header, payload, .. } => found.push(Owned(header, payload)),
            }
        }
        if received != Received::More {
            return (found, received);
        }
    }
}

#[test]
fn frames_of_all_sizes_arrive_in_order() {
    let sizes = [0, 1, 100, 65_536, 65_537, 300_000, 3, 2_000_000, 0, 70_000];
    let (here, there) = UnixStream::pair().unwrap();
    here.set_nonblocking(true).unwrap();
    let (mut outbox, mut inbox) = (Outbox::default(), Inbox::default());
    let (mut pool, mut scratch) = (BufferPool::default(), Scratch::with_read_bytes(7_777));
    for (i, &size) in sizes.iter().enumerate() {
        let payload = vec![i as u8; size];
        let payload = match i % 3 {
            0 => Payload::Owned(payload),
            1 => Payload::Shared(payload.into()),
            _ => Payload::Copied(&payload),
        };
        outbox.push(kind::RESULT, i as u64, &Status { text: "x" }, &[], payload).unwrap();
    }
    let mut found = Vec::new();
    while found.len() < sizes.len() {
        outbox.flush(&here, &mut pool).unwrap();
        found.extend(drain(&mut inbox, &there, &mut scratch).0);
    }
    for (i, &size) in sizes.iter().enumerate() {
        assert_eq!(found[i].0.number, i as u64);
        assert_eq!(found[i].1, vec![i as u8; size]);
    }
    assert!(outbox.is_empty() && !inbox.is_mid_frame());
    drop(here);
    // The end of the stream can be delayed, because a process started by another test can briefly hold a copy of the
    // socket.
    let began = std::time::Instant::now();
    while drain(&mut inbox, &there, &mut scratch).1 != Received::Closed {
        assert!(began.elapsed().as_secs() < 120, "the end of the stream was not reported");
        std::thread::yield_now();
    }
}

#[test]
fn buffered_frames_are_returned_by_the_next_receive() {
    let (here, there) = UnixStream::pair().unwrap();
    let (mut outbox, mut inbox) = (Outbox::default(), Inbox::default());
    let (mut pool, mut scratch) = (BufferPool::default(), Scratch::with_read_bytes(7_777));
    for (number, size) in [(1, 0), (2, 20_000), (3, 0), (4, 100_000)] {
        outbox.push(kind::RESULT, number, &Empty, &[], Payload::Copied(&vec![7; size])).unwrap();
    }
    here.set_nonblocking(true).unwrap();
    outbox.flush(&here, &mut pool).unwrap();
    let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
    assert!(matches!(batch.next().unwrap(), Some(Item::Frame { header: Header { number: 1, .. }, .. })));
    batch.keep_rest();
    let mut numbers = Vec::new();
    while numbers.len() < 3 {
        outbox.flush(&here, &mut pool).unwrap();
        numbers.extend(drain(&mut inbox, &there, &mut scratch).0.iter().map(|frame| frame.0.number));
    }
    assert_eq!(numbers, [2, 3, 4]);

    // The batch keeps a second frame. The next receive must return this frame even if no further bytes arrive on the
    // socket.
    outbox.push(kind::RESULT, 5, &Empty, &[], Payload::NONE).unwrap();
    outbox.push(kind::RESULT, 6, &Empty, &[], Payload::NONE).unwrap();
    assert!(outbox.flush(&here, &mut pool).unwrap());
    let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
    assert!(batch.next().unwrap().is_some());
    batch.keep_rest();
    assert_eq!(drain(&mut inbox, &there, &mut scratch).0[0].0.number, 6);
    assert_eq!(inbox.partial.capacity(), 0);
}

#[test]
fn unaccepted_payload_is_never_stored() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut outbox = Outbox::default();
    outbox.push(kind::SUBMIT, 1, &Empty, &[], Payload::Owned(vec![1; 1_000_000])).unwrap();
    outbox.push(kind::CANCEL, 2, &Empty, &[], Payload::NONE).unwrap();
    let (mut inbox, mut scratch, mut pool) = (Inbox::default(), Scratch::default(), BufferPool::default());
    here.set_nonblocking(true).unwrap();
    let mut seen = Vec::new();
    while seen.len() < 2 {
        outbox.flush(&here, &mut pool).unwrap();
        let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
        while let Some(item) = batch.next().unwrap() {
            match item {
                Item::Announced { header, .. } | Item::Frame { header, .. } => seen.push(header.number),
                Item::Large { .. } => panic!("the payload was stored"),
            }
        }
        assert!(inbox.held_bytes() < 100);
    }
    assert_eq!(seen, [1, 2]);
}

#[test]
fn memory_grows_with_received_not_announced_bytes() {
    let total = 8 << 20;
    let mut announcement = Outbox::default();
    announcement.push(kind::SUBMIT, 1, &Empty, &[], Payload::Owned(vec![7; total])).unwrap();
    let mut bytes: Vec<u8> =
        announcement.segments.iter().filter_map(Segment::bytes).flatten().copied().collect();
    let payload_at = bytes.len() - total;
    bytes[payload_at..].iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
    let (mut here, there) = UnixStream::pair().unwrap();
    let (mut inbox, mut scratch, mut pool) = (Inbox::default(), Scratch::default(), BufferPool::default());
    // When two bytes of the payload have arrived, the inbox must not yet hold a buffer of the announced size. This also
    // applies to a buffer from the pool.
    pool.put(vec![1; total]);
    let mut sent = 0;
    for arrived in [2, 100, 5_000, 70_000, 500_000, 3_000_000, total] {
        let end = payload_at + arrived;
        while sent < end {
            let piece = (end - sent).min(50_000);
            std::io::Write::write_all(&mut here, &bytes[sent..sent + piece]).unwrap();
            sent += piece;
            inbox.grow(&mut pool);
            let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
            match batch.next().unwrap() {
                Some(Item::Announced { .. }) => {
                    let fit = pool.take(batch.buffer_bytes());
                    batch.accept(fit);
                    assert!(batch.next().unwrap().is_none());
                }
                Some(Item::Large { payload, .. }) => {
                    assert!(arrived == total && payload == bytes[payload_at..]);
                    assert!(pool.bytes < total, "the pooled buffer was not used");
                    return;
                }
                _ => {}
            }
        }
        let most = POOL_OVERSIZE_FACTOR_MAX * LARGE_GROWTH_FACTOR_MAX * arrived.max(LARGE_BUFFER_BYTES_MIN)
            + METADATA_BYTES_TYPICAL;
        assert!(inbox.held_bytes() <= most, "{arrived} bytes arrived, {} bytes are held", inbox.held_bytes());
    }
    panic!("the frame was not completed");
}

#[test]
fn buffer_pool_drops_oversized_buffers() {
    let mut pool = BufferPool::default();
    pool.put(Vec::with_capacity(POOL_BYTES_MAX));
    assert_eq!(pool.take(100_000).capacity(), 0, "the buffer is too large for the request");
    (0..3).for_each(|_| pool.put(Vec::with_capacity(1 << 20)));
    assert_eq!((pool.buffers.len(), pool.bytes), (3, 3 << 20));
    assert!(pool.take(600_000).capacity() == 1 << 20);
    assert_eq!((pool.buffers.len(), pool.bytes), (2, 2 << 20));
}

#[test]
fn idle_connections_hold_no_memory() {
    let (here, there) = UnixStream::pair().unwrap();
    let (mut outbox, mut inbox) = (Outbox::default(), Inbox::default());
    let (mut pool, mut scratch) = (BufferPool::default(), Scratch::default());
    outbox.push(kind::RESULT, 1, &Empty, &[], Payload::Copied(&[7; 50_000])).unwrap();
    assert!(outbox.flush(&here, &mut pool).unwrap());
    drain(&mut inbox, &there, &mut scratch);
    assert!(outbox.spare.capacity() <= SPARE_BYTES_MAX && outbox.segments.is_empty());
    outbox.free_buffers();
    assert_eq!((outbox.spare.capacity(), outbox.segments.capacity()), (0, 0));
    assert_eq!(inbox.partial.capacity(), 0);
}

#[test]
fn idle_connections_share_buffers() {
    let (here, there) = UnixStream::pair().unwrap();
    let (mut pool, mut inbox, mut scratch) = (BufferPool::default(), Inbox::default(), Scratch::default());
    for mut outbox in [Outbox::default(), Outbox::default()] {
        for _ in 0..2 {
            let payload = Payload::Copied(b"x");
            outbox.push_pooled(kind::JOB, 1, &Empty, &[], payload, &mut pool).unwrap();
            outbox.release_buffer(&mut pool);
        }
        assert!(outbox.waiting_bytes() > 0 && pool.spares.is_empty(), "the buffer still holds unsent bytes");
        assert!(outbox.flush(&here, &mut pool).unwrap());
        outbox.release_buffer(&mut pool);
        assert_eq!((outbox.spare.capacity(), pool.spares.len()), (0, 1), "both connections share a buffer");
        drain(&mut inbox, &there, &mut scratch);
    }
    (0..2 * POOL_SPARES_MAX).for_each(|_| pool.put_spare(Vec::with_capacity(1)));
    assert_eq!(pool.spares.len(), POOL_SPARES_MAX);
}
