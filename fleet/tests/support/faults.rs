//! Injects faults into agents, supervisors and the server.

use bulkhead_fleet::decide::Event;
use bulkhead_fleet::decide::outcome::AttemptEnd;
use bulkhead_shared::Executed;

use super::random::Random;
use super::server::Ms;
use super::world::{ACK_WAIT, Coverage, FAULTS_UNTIL, HOST_LOST_AFTER, Happening, SHORT, World};

impl World {
    /// Schedules the faults of a simulated history.
    pub(crate) fn plan_faults(&mut self) {
        let at = |random: &mut Random| random.below(FAULTS_UNTIL);
        for _ in 0..self.random.below(6) {
            let agent = self.random.below(self.agents.len() as u64) as usize;
            let moment = at(&mut self.random);
            let happening = match self.random.below(4) {
                0 => Happening::Kill { agent },
                1 => Happening::Freeze { agent, time: self.random.between(ACK_WAIT, 3 * HOST_LOST_AFTER) },
                2 => Happening::Freeze { agent, time: self.random.below(SHORT) },
                _ => Happening::LoseSupervisor { agent },
            };
            self.after(moment, happening);
        }
        for _ in 0..self.random.below(3) {
            let moment = at(&mut self.random);
            self.after(moment, Happening::ChangeLeader);
            let time = self.random.below(SHORT);
            self.after(moment, Happening::Outage { time });
        }
        // Schedules at most one long outage. Two outages longer than `ack_wait` during the same job could cause the
        // outcome `host_lost`.
        if self.random.chance(40) {
            let (moment, time) = (at(&mut self.random), self.random.between(ACK_WAIT, 60_000));
            self.after(moment, Happening::Outage { time });
        }
    }

    pub(crate) fn kill(&mut self, agent: usize, coverage: &mut Coverage) {
        coverage.count("agent killed");
        let holder = self.holder(agent);
        self.impaired.push(holder);
        let back = self.now + self.random.below(2 * HOST_LOST_AFTER);
        let agent = &mut self.agents[agent];
        agent.life += 1;
        agent.held.clear();
        agent.kept_until.clear();
        agent.dead_until = back;
        self.last_fault = self.last_fault.max(back);
    }

    pub(crate) fn freeze(&mut self, agent: usize, time: Ms, coverage: &mut Coverage) {
        if time > SHORT {
            let holder = self.holder(agent);
            self.impaired.push(holder);
        }
        if time > HOST_LOST_AFTER {
            coverage.count("agent frozen beyond host_lost_after");
        }
        let until = self.now + time;
        self.agents[agent].frozen_until = self.agents[agent].frozen_until.max(until);
        self.last_fault = self.last_fault.max(until);
    }

    /// Simulates the failure of an agent's supervisor. All jobs in the supervisor are lost.
    pub(crate) fn lose_supervisor(&mut self, agent: usize, coverage: &mut Coverage) {
        let to = self.holder(agent);
        let running: Vec<u64> = self.agents[agent]
            .held
            .iter()
            .filter(|(_, held)| held.run.is_some())
            .map(|(&seq, _)| seq)
            .collect();
        for sequence in running {
            coverage.count("supervisor lost");
            self.agents[agent].held.get_mut(&sequence).expect("held").run = None;
            let executed = Executed::Unknown;
            let event = Event::Ended(AttemptEnd::Disconnected { executed });
            self.after(1, Happening::Answer { to, sequence, event });
        }
        self.last_fault = self.last_fault.max(self.now);
    }

    pub(crate) fn outage(&mut self, time: Ms, coverage: &mut Coverage) {
        if !self.server.is_up {
            return;
        }
        coverage.count(if time > SHORT { "outage beyond ack_wait" } else { "short outage" });
        self.server.is_up = false;
        self.last_fault = self.last_fault.max(self.now + time);
        self.after(time, Happening::OutageEnds);
    }
}
