use super::*;

const MIB: u64 = 1 << 20;
const BUDGET: Budget = Budget { pooled_bytes_max: 64 * MIB, buffered_bytes_max: 64 * MIB, waiting_bytes: 0 };
const WORKER: u64 = 7;

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

fn client(epoch: u64) -> SessionId {
    SessionId { index: Default::default(), epoch }
}

struct Fixture(Leases);

impl Fixture {
    fn new() -> Self {
        Self(Leases::new(100_000))
    }

    fn effects(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.0.next_effect())
            .map(|effect| match effect {
                Effect::CreateFiles { lease, .. } => format!("create {lease}"),
                Effect::FreeFiles(_) => "free".into(),
                Effect::RejectRequest { request, .. } => format!("reject {request}"),
                Effect::Recall { lease, .. } => format!("recall {lease}"),
                Effect::CountMisuse { .. } => "misuse".into(),
                Effect::EndLoan { worker, lease } => format!("end loan {lease} of {worker}"),
            })
            .collect()
    }

    fn request(&mut self, now: Time, of: SessionId, request: u64, bytes: u64) -> Vec<String> {
        let wanted = LeaseRequest { bulkhead: "decode", tenant: "", bytes };
        self.0.request(now, (of, request), "decode".into(), &wanted, BUDGET);
        self.effects()
    }

    fn created(&mut self, lease: u64) {
        self.0.files_created(lease, MIB, Files::make(MIB));
    }

    fn send_offer(&mut self, now: Time, sent: Sent) -> Option<u64> {
        let offer = self.0.next_offer()?;
        let lease = offer.named.lease;
        self.0.offer_sent(now, offer, sent);
        Some(lease)
    }

    /// Returns a fixture whose client has confirmed one lease.
    fn held(now: Time) -> Self {
        let mut this = Self::new();
        assert_eq!(this.request(now, client(1), 40, MIB), ["create 1"]);
        this.created(1);
        assert_eq!(this.send_offer(now, Sent::Yes), Some(1));
        this.0.accepted(client(1), 1);
        assert!(this.effects().is_empty());
        this
    }

    fn begin_job(&mut self, now: Time) -> LeasedPayload {
        let named = LeaseRef { lease: 1, bytes: MIB / 2 };
        self.0.check_job(now, client(1), ("decode", ""), (named, 0)).unwrap();
        *self.0.begin_job(named).unwrap().0
    }
}

#[test]
fn rejects_lease_request_beyond_budget() {
    let mut leases = Fixture::new();
    assert_eq!(leases.request(at(0), client(1), 40, 33 * MIB), ["misuse", "reject 40"]);
}

#[test]
fn idle_lease_is_recalled_and_then_revoked() {
    let mut leases = Fixture::held(at(0));
    leases.0.check_deadlines(at(9));
    assert!(leases.effects().is_empty());
    leases.0.check_deadlines(at(10));
    assert_eq!(leases.effects(), ["recall 1"]);
    leases.0.check_deadlines(at(15));
    assert_eq!(leases.effects(), ["free"]);
    assert_eq!(leases.0.bytes(), 0);
    let named = LeaseRef { lease: 1, bytes: MIB / 2 };
    let rejection = leases.0.check_job(at(16), client(1), ("decode", ""), (named, 0));
    assert_eq!(rejection, Err((RejectReason::Overloaded, REVOKED)));
}

#[test]
fn frees_files_if_offer_cannot_be_sent() {
    let mut leases = Fixture::new();
    leases.request(at(0), client(1), 40, MIB);
    leases.created(1);
    assert_eq!(leases.send_offer(at(0), Sent::NotNow), Some(1));
    assert_eq!(leases.effects(), ["free", "reject 40"]);
    assert_eq!((leases.0.bytes(), leases.0.any_live()), (0, false));
}

#[test]
fn lends_files_only_to_first_worker() {
    let mut leases = Fixture::held(at(0));
    leases.0.worker_ready(WORKER);
    leases.0.worker_ready(8);
    let mut payload = leases.begin_job(at(1));
    let (named, _, loan) = leases.0.give(&mut payload, WORKER, "decode", None);
    assert!(named.is_none());
    leases.0.loan_sent(WORKER, &loan.unwrap(), Sent::Yes);
    assert!(leases.0.loan_confirmed(WORKER, 1));
    assert!(!leases.0.loan_confirmed(WORKER, 1), "a loan cannot be confirmed twice");
    leases.0.worker_done(WORKER, JobId(1), Some(&mut payload));
    let is_by_name = |leases: &mut Fixture, worker| {
        let mut payload = leases.begin_job(at(2));
        let (named, _, loan) = leases.0.give(&mut payload, worker, "decode", None);
        assert!(loan.is_none());
        leases.0.end_job(at(2), payload, None, true, |_| true);
        named.is_some()
    };
    leases.0.end_job(at(1), payload, None, true, |_| true);
    assert!(!is_by_name(&mut leases, 8));
    assert!(is_by_name(&mut leases, WORKER));
    leases.0.worker_gone(at(3), WORKER);
    assert_eq!(leases.effects(), ["recall 1"]);
}

#[test]
fn keeps_files_until_late_worker_replies() {
    let mut leases = Fixture::held(at(0));
    leases.0.worker_ready(WORKER);
    let mut payload = leases.begin_job(at(0));
    leases.0.give(&mut payload, WORKER, "decode", Some(0));
    leases.0.end_job(at(1), payload, Some(JobId(3)), false, |_| true);
    assert_eq!(leases.effects(), ["recall 1"]);
    leases.0.returned(client(1), 1);
    assert!(leases.effects().is_empty());
    leases.0.worker_done(WORKER, JobId(3), None);
    assert_eq!(leases.effects(), ["free"]);
}

#[test]
fn ends_leases_when_client_disconnects() {
    let mut leases = Fixture::held(at(0));
    assert_eq!(leases.request(at(1), client(2), 41, MIB), ["create 2"]);
    leases.0.client_gone(at(1), client(2));
    leases.created(2);
    assert_eq!(leases.effects(), ["free"]);
    leases.0.client_gone(at(1), client(1));
    assert_eq!(leases.effects(), ["free"]);
    assert_eq!(leases.0.bytes(), 0);
}

#[test]
fn files_can_still_be_read_after_connection_is_moved() {
    let mut leases = Fixture::held(at(0));
    let payload = leases.begin_job(at(1));
    leases.0.stop_lending(at(2));
    assert!(leases.effects().is_empty() && !leases.0.allow_move(client(1), true));
    leases.0.end_job(at(3), payload, None, true, |_| true);
    leases.0.recall_all_idle(at(3));
    assert_eq!(leases.effects(), ["recall 1"]);
    assert!(leases.0.allow_move(client(1), true) && !leases.0.allow_move(client(1), false));
    leases.0.client_gone(at(4), client(1));
    assert!(leases.0.allow_move(client(1), false) && leases.0.has_unreturned() && leases.0.needs_checks());
    leases.0.check_deadlines(at(8));
    assert!(leases.effects().is_empty());
    leases.0.check_deadlines(at(9));
    assert_eq!(leases.effects(), ["free"]);
    assert!(!leases.0.has_unreturned() && !leases.0.any_live());
}

#[test]
fn unconfirmed_offer_is_recalled() {
    let mut leases = Fixture::new();
    leases.request(at(0), client(1), 40, MIB);
    leases.request(at(0), client(1), 41, MIB);
    leases.created(1);
    leases.created(2);
    assert_eq!(leases.send_offer(at(0), Sent::Yes), Some(1));
    assert_eq!(leases.send_offer(at(0), Sent::Yes), None, "the first offer is not confirmed yet");
    leases.0.check_deadlines(at(4));
    assert!(leases.effects().is_empty());
    leases.0.check_deadlines(at(5));
    assert_eq!(leases.effects(), ["reject 41", "free", "recall 1"]);
}

#[test]
fn recalls_longest_idle_lease_first() {
    let mut leases = Fixture::held(at(0));
    leases.request(at(1), client(1), 41, MIB);
    leases.created(2);
    leases.send_offer(at(1), Sent::Yes);
    leases.0.accepted(client(1), 2);
    leases.0.enforce_budget(at(2), Budget { waiting_bytes: 61 * MIB, ..BUDGET });
    assert_eq!(leases.effects(), ["recall 1"]);
    assert!(leases.0.needs_checks());
}

#[test]
fn recalls_leases_of_a_single_bulkhead() {
    let mut leases = Fixture::held(at(0));
    leases.0.recall_for_bulkhead(at(1), "encode");
    assert!(leases.effects().is_empty());
    leases.0.recall_for_bulkhead(at(1), "decode");
    assert_eq!(leases.effects(), ["recall 1"]);
}

#[test]
fn accepts_result_file_only_from_worker_running_the_job() {
    let mut leases = Fixture::held(at(0));
    leases.0.worker_ready(WORKER);
    let mut payload = leases.begin_job(at(1));
    let (_, _, loan) = leases.0.give(&mut payload, WORKER, "decode", None);
    leases.0.loan_sent(WORKER, &loan.unwrap(), Sent::Yes);
    let result = LeaseRef { lease: 1, bytes: 10 };
    assert!(!payload.result_written(WORKER, result), "the worker got the payload as bytes");
    assert!(leases.0.loan_confirmed(WORKER, 1));
    leases.0.give(&mut payload, WORKER, "decode", None);
    assert!(!payload.result_written(8, result));
    assert!(payload.result_written(WORKER, result));
    let named = leases.0.end_job(at(2), payload, None, true, |_| true);
    assert_eq!(named.map(|named| named.bytes), Some(10));
}
