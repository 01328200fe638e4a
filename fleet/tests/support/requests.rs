//! Handles requests from the agents to the server, and checks the invariants for new records.

use bulkhead_fleet::decide::{Event, Write, WriteResult};
use bulkhead_fleet::record::{Phase, ReadError, Stored};
use bulkhead_shared::{CrashReason, Verdict};

use super::server::{Ms, is_foreign};
use super::world::{Coverage, Happening, Holder, Request, World};

impl World {
    /// Sends an agent's request to the simulated server. If the request is lost, the agent sees a timeout.
    pub(crate) fn request(&mut self, to: Holder, sequence: u64, request: Request) {
        const TIMEOUT: Ms = 5000;
        // The connection is a byte stream, so a heartbeat cannot be lost while the server is up.
        let is_single = matches!(request, Request::InProgress);
        if !is_single && self.is_lost() {
            if let Some(event) = no_answer(&request) {
                self.after(TIMEOUT, Happening::Answer { to, sequence, event });
            }
            return;
        }
        let delay = if is_single { self.random.below(20) } else { self.latency() };
        self.after(delay, Happening::Arrive { to, sequence, request });
    }

    pub(crate) fn arrive(&mut self, to: Holder, sequence: u64, request: Request, coverage: &mut Coverage) {
        const TIMEOUT: Ms = 5000;
        if !self.server.is_up {
            if let Some(event) = no_answer(&request) {
                self.after(TIMEOUT, Happening::Answer { to, sequence, event });
            }
            return;
        }
        let job = self.agents[to.agent].held.get(&sequence).map(|held| held.job);
        match request {
            Request::InProgress => self.server.in_progress(sequence, self.now),
            Request::Negative(delay) => self.server.negative_acknowledge(sequence, delay, self.now),
            Request::Acknowledge => {
                self.server.acknowledge(sequence, self.now, &mut self.random);
                self.reply(to, sequence, Event::Acknowledged);
            }
            Request::Read => {
                let Some(job) = job else { return };
                let read = self.server.read(job, &mut self.random);
                if read != self.server.ledgers[job].history.last().cloned() {
                    coverage.count("stale read");
                }
                let read = match read {
                    Some(Stored { sequence, record }) if is_foreign(&record) => {
                        coverage.count("foreign record read");
                        Err(ReadError::Unreadable { sequence, is_decided: false, message: String::new() })
                    }
                    read => Ok(read),
                };
                self.reply(to, sequence, Event::Read(read));
            }
            Request::Write(write) => {
                let Some(job) = job else { return };
                self.arrive_write(to, sequence, job, &write, coverage);
            }
        }
    }

    fn arrive_write(
        &mut self,
        to: Holder,
        sequence: u64,
        job: usize,
        write: &Write,
        coverage: &mut Coverage,
    ) {
        const TIMEOUT: Ms = 5000;
        // The server's size limit may have been lowered since the agent connected.
        let has_result =
            matches!(&write.record.phase, Phase::Decided { ending, .. } if !ending.payload.is_empty());
        if has_result && self.random.chance(20) {
            coverage.count("result too large");
            return self.reply(to, sequence, Event::Written(WriteResult::TooLarge));
        }
        // Most writes take milliseconds. After a leader change, some writes take longer than the agent's timeout.
        let time = if self.random.chance(5) { self.random.below(8000) } else { self.random.between(1, 10) };
        match self.server.begin_write(job, write, self.now + time) {
            Some(result) => {
                let what = if result == WriteResult::Pending {
                    "write answered as pending"
                } else {
                    "write conflicted"
                };
                coverage.count(what);
                self.reply(to, sequence, Event::Written(result));
            }
            None => {
                let is_answered = !self.is_lost() && time < TIMEOUT;
                if !is_answered {
                    coverage.count("answer lost");
                    let event = Event::Written(WriteResult::Unknown);
                    self.after(TIMEOUT, Happening::Answer { to, sequence, event });
                }
                self.after(time, Happening::Stored { job, writer: to, sequence, is_answered });
            }
        }
    }

    pub(crate) fn stored(
        &mut self,
        job: usize,
        writer: Holder,
        sequence: u64,
        is_answered: bool,
        coverage: &mut Coverage,
    ) {
        let Some((stored, replaced)) = self.server.store(job) else { return };
        self.check_record(job, writer, replaced.as_ref(), coverage);
        if is_answered {
            self.reply(writer, sequence, Event::Written(WriteResult::Stored(stored)));
        }
    }

    /// Checks the invariants after a new record has been stored.
    fn check_record(
        &mut self,
        job: usize,
        writer: Holder,
        replaced: Option<&Stored>,
        coverage: &mut Coverage,
    ) {
        let history = &self.server.ledgers[job].history;
        let record = history.last().expect("just stored").record.clone();
        if replaced.is_some_and(|old| matches!(old.record.phase, Phase::Decided { .. })) {
            self.violate(format!("job {job}: a decided record was replaced with {record:?}"));
        }
        if replaced.is_some_and(|old| is_foreign(&old.record)) {
            coverage.count("foreign record replaced");
            if !matches!(record.phase, Phase::Decided { .. }) {
                self.violate(format!("job {job}: a foreign record was replaced with {record:?}"));
            }
        }
        match &record.phase {
            Phase::Claimed { .. } if is_claim(replaced) => {
                coverage.count("lost claim taken over");
                self.check_holder(job, writer, replaced);
            }
            Phase::Decided { ending, .. } => match &ending.outcome.verdict {
                Verdict::Crashed { reason: CrashReason::HostLost, .. } => {
                    coverage.count("host_lost decided");
                    self.check_holder(job, writer, replaced);
                }
                Verdict::Ok if self.jobs[job].completed == 0 => {
                    self.violate(format!("job {job} has the outcome ok but never completed"));
                }
                Verdict::DeadlineQueued => coverage.count("late decided"),
                _ => {}
            },
            _ => {}
        }
    }

    /// Checks that a claim is taken over only if the agent with the previous claim has actually failed.
    fn check_holder(&mut self, job: usize, writer: Holder, replaced: Option<&Stored>) {
        let Some(old) = replaced.filter(|old| is_claim(Some(old))) else {
            return;
        };
        let mut holder = old.record.agent.split('-').skip(1).filter_map(|number| number.parse::<u64>().ok());
        let (Some(agent), Some(life)) = (holder.next(), holder.next()) else { return };
        let holder = Holder { agent: agent as usize, life };
        // An agent whose supervisor has failed may replace its own claim.
        if holder != writer && !self.impaired.contains(&holder) {
            self.violate(format!("job {job} of the living {holder:?} was declared lost by {writer:?}"));
        }
    }

    fn reply(&mut self, to: Holder, sequence: u64, event: Event) {
        const TIMEOUT: Ms = 5000;
        let (event, delay) = match (self.is_lost(), event) {
            (true, Event::Written(_)) => (Event::Written(WriteResult::Unknown), TIMEOUT),
            (true, Event::Read(_)) => (Event::Read(failed_read()), TIMEOUT),
            (true, event) => (event, TIMEOUT),
            (false, event) => (event, self.latency()),
        };
        self.after(delay, Happening::Answer { to, sequence, event });
    }
}

fn failed_read() -> Result<Option<Stored>, ReadError> {
    Err(ReadError::Failed(String::new()))
}

fn is_claim(stored: Option<&Stored>) -> bool {
    stored.is_some_and(|stored| matches!(stored.record.phase, Phase::Claimed { .. }))
}

/// Returns the event for a request that timed out, or `None` if the agent does not wait for a response.
fn no_answer(request: &Request) -> Option<Event> {
    match request {
        Request::Read => Some(Event::Read(failed_read())),
        Request::Write(_) => Some(Event::Written(WriteResult::Unknown)),
        Request::Acknowledge => Some(Event::Acknowledged),
        Request::InProgress | Request::Negative(_) => None,
    }
}
