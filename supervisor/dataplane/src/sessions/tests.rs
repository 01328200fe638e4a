use bulkhead_shared::connection::{BufferPool, Item, Scratch};
use bulkhead_shared::in_process;

use super::*;

const LIMITS: (u64, usize) = (1 << 20, 64 << 20);

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

fn client(uid: u32) -> Client {
    Client { peer: None, grant: Grant::Unrestricted, owner: Owner::User(uid), permit: None }
}

/// Opens a session for user 1. The session starts waiting for the HELLO frame at the time `now`.
fn open(sessions: &mut Sessions, now: Time) -> (SessionIndex, in_process::Endpoint) {
    let (end, peer) = in_process::pair();
    let epoch = sessions.next_epoch();
    let phase = Phase::AwaitingHello { since: now };
    let id = (epoch, Holder::default());
    (sessions.open(ClientEndpoint::InProcess(end), client(1), phase, id, now), peer)
}

#[test]
fn supervisor_pause_extends_timeouts() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].mid_frame_since = Some(at(2));
    // The timer starts during the pause. Extending the timeout must not move the timer's start into the future.
    sessions[index].unread_since = Some(at(50));
    sessions.extend_timeouts(Duration::from_secs(40), at(60));
    let session = &sessions[index];
    assert_eq!(session.phase, Phase::AwaitingHello { since: at(41) });
    assert_eq!((session.mid_frame_since, session.unread_since), (Some(at(42)), Some(at(60))));
}

#[test]
fn rejects_client_that_does_not_send_hello() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    assert!(sessions.needs_checks());
    assert!(sessions.check_timeouts(at(6)).is_empty());
    assert_eq!(sessions.check_timeouts(at(7)), [(index, Some("the client did not send HELLO in time"))]);
}

#[test]
fn rejects_client_stalled_mid_frame() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].phase = Phase::Open;
    receive_beginning(&mut sessions, index, at(1));
    assert!(sessions.check_timeouts(at(31)).is_empty());
    assert_eq!(sessions.check_timeouts(at(32)).len(), 1);
}

/// Time during which the supervisor does not read from the client does not count towards the client's time limit for
/// completing a frame.
#[test]
fn read_pause_extends_time_limit_for_a_frame() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    let session = &mut sessions[index];
    session.phase = Phase::Open;
    let result = Payload::Owned(vec![0; UNREAD_BYTES_PAUSE + 1]);
    session.outbox.push(kind::OUTCOME, 7, &Empty, &[], result).unwrap();
    receive_beginning(&mut sessions, index, at(1));
    let session = &mut sessions[index];
    assert!(session.pause_if_behind(at(11)) && session.pause_if_behind(at(20)));
    // The client reads a little from time to time. Otherwise, the client would be disconnected because it does not read
    // its output.
    let waiting = session.outbox.waiting_bytes();
    for seconds in [30, 50] {
        assert_eq!(sessions.flushed(index, waiting + 1, at(seconds), LIMITS), AfterFlush::Keep);
        assert!(sessions.check_timeouts(at(seconds)).is_empty());
    }
    sessions[index].outbox = Outbox::default();
    assert_eq!(sessions.flushed(index, waiting, at(61), LIMITS), AfterFlush::Keep);
    assert!(sessions.check_timeouts(at(81)).is_empty(), "20 of 30 s are left after the pause");
    assert_eq!(sessions.check_timeouts(at(82)).len(), 1);
}

#[test]
fn disconnects_client_that_reads_nothing() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].phase = Phase::Open;
    sessions.send_signal(sessions.id(index), kind::LEASE_ENDED, 1);
    assert_eq!(sessions.next_dirty(), Some(index));
    let waiting = sessions[index].outbox.waiting_bytes();
    assert_eq!(sessions.flushed(index, waiting, at(2), LIMITS), AfterFlush::Keep);
    assert_eq!(sessions.unread_bytes(), waiting);
    assert!(sessions.check_timeouts(at(32)).is_empty());
    assert_eq!(sessions.check_timeouts(at(33)), [(index, None)]);
    sessions.close(index);
    assert_eq!((sessions.unread_bytes(), sessions.clients()), (0, 0));
    assert!(sessions.check_timeouts(at(34)).is_empty() && !sessions.needs_checks());
}

#[test]
fn disconnects_client_over_the_unread_limit() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].phase = Phase::Open;
    sessions.send_signal(sessions.id(index), kind::LEASE_ENDED, 1);
    assert_eq!(sessions.flushed(index, 100, at(2), (0, 0)), AfterFlush::CloseBehind(index));
}

#[test]
fn rejected_session_ends_after_all_output_is_sent() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    assert!(sessions.reject(index, RejectReason::Invalid, "no"));
    assert!(!sessions.reject(index, RejectReason::Invalid, "no"));
    assert_eq!(sessions.flushed(index, 10, at(1), LIMITS), AfterFlush::Keep);
    sessions[index].outbox = Outbox::default();
    assert_eq!(sessions.flushed(index, 10, at(1), LIMITS), AfterFlush::Finish);
}

#[test]
fn removes_request_once_it_has_an_outcome() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    let id = sessions.id(index);
    let place = (CompartmentIndex::default(), JobId(1));
    sessions.record_job(id, 7, place, BulkheadIndex::default());
    assert_eq!(sessions.request(index, 7), Some(place));
    assert!(sessions.finish_request(id, 7) && sessions.request(index, 7).is_none());
    sessions.record_job(id, 8, place, BulkheadIndex::default());
    assert_eq!(sessions.begin_closing(index), [place]);
    sessions.close(index);
    assert!(!sessions.finish_request(id, 8));
}

/// Simulates the arrival of the first bytes of a frame in a session.
fn receive_beginning(sessions: &mut Sessions, index: SessionIndex, now: Time) {
    sessions[index].inbox = Inbox::with_partial(vec![1; 4]);
    sessions.received(index, Received::Drained, now);
}

#[test]
fn request_held_back_for_successor_does_not_time_out() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].phase = Phase::Open;
    receive_beginning(&mut sessions, index, at(1));
    assert_eq!(sessions.check_timeouts(at(32)).len(), 1);
    sessions[index].is_held_back = true;
    receive_beginning(&mut sessions, index, at(2));
    assert!(sessions.check_timeouts(at(3600)).is_empty());
}

#[test]
fn disconnects_client_that_ignores_goaway() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].phase = Phase::Open;
    let id = sessions.id(index);
    sessions.record_request(id, 7, CompartmentIndex::default(), JobId(1));
    sessions.send_goaway(index);
    sessions[index].outbox = Outbox::default();
    assert!(
        sessions.needs_checks() && sessions.check_timeouts(at(60)).is_empty(),
        "a client with a job must not be disconnected"
    );
    sessions.finish_request(id, 7);
    assert!(sessions.check_timeouts(at(61)).is_empty());
    // The time limit is not extended when the client sends more input.
    receive_beginning(&mut sessions, index, at(70));
    assert_eq!(sessions.check_timeouts(at(71)), [(index, None)]);
}

#[test]
fn replaced_supervisor_disconnects_client_that_never_reads() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    sessions[index].phase = Phase::Open;
    sessions.send_signal(sessions.id(index), kind::LEASE_ENDED, 1);
    assert!(!sessions[index].is_left_over(at(10)) && !sessions[index].is_left_over(at(609)));
    receive_beginning(&mut sessions, index, at(609));
    assert!(sessions[index].is_left_over(at(610)));
}

/// Simulates the arrival of the first part of a large job.
fn receive_part_of_large_job(session: &mut Session) {
    let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut outbox = Outbox::default();
    outbox.push(kind::SUBMIT, 1, &Empty, &[], Payload::Owned(vec![0; UNREAD_BYTES_PAUSE])).unwrap();
    here.set_nonblocking(true).unwrap();
    outbox.flush(&here, &mut BufferPool::default()).unwrap();
    let mut scratch = Scratch::default();
    let (_, mut batch) = session.inbox.receive(&there, &mut scratch).unwrap();
    assert!(matches!(batch.next(), Ok(Some(Item::Announced { .. }))));
    batch.accept(Vec::new());
    assert!(matches!(batch.next(), Ok(None)));
    assert!(session.inbox.is_storing());
}

#[test]
fn slow_reader_in_the_middle_of_a_large_job_is_disconnected() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    let session = &mut sessions[index];
    session.phase = Phase::Open;
    receive_part_of_large_job(session);
    assert!(
        !session.is_left_over(at(2)) && !session.is_left_over(at(700)),
        "the job is still being received"
    );
    // The time limit for the frame does not apply while reading is paused.
    let result = Payload::Owned(vec![0; UNREAD_BYTES_PAUSE + 1]);
    session.outbox.push(kind::OUTCOME, 7, &Empty, &[], result).unwrap();
    assert!(session.pause_if_behind(at(701)));
    assert!(!session.is_left_over(at(701)) && !session.is_left_over(at(1300)));
    assert!(session.is_left_over(at(1301)));
}

#[test]
fn goaway_is_also_sent_to_client_with_leases_only() {
    let mut sessions = Sessions::new();
    let (index, _peer) = open(&mut sessions, at(1));
    let session = &mut sessions[index];
    session.phase = Phase::Open;
    session.is_held_back = true;
    assert!(
        session.hides_lease_returns() && !session.can_go_away(true),
        "the client does not support GOAWAY"
    );
    session.takes_goaway = true;
    assert!(!session.hides_lease_returns() && session.can_go_away(true));
    assert!(!session.can_go_away(false), "the connection can be moved");
    sessions.send_goaway(index);
    assert!(!sessions[index].can_go_away(true));
}
