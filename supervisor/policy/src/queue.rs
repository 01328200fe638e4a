//! The jobs of one bulkhead that wait, and whose turn is next: strictly by class; within a class by
//! turns over the tenants, each with the same share by cost; within a tenant oldest first. It knows
//! nothing of a job but its number, class, tenant and cost, and never decides that one is to leave.
//!
//! Within a class it is deficit round robin (Shreedhar and Varghese, "Efficient Fair Queuing Using
//! Deficit Round Robin", 1995): in each round every tenant earns a quantum, and its oldest job goes once
//! the tenant has earned what it costs. The paper takes a quantum as large as the largest job, so that
//! no round is walked for nothing; but then a tenant's small jobs go many in a row. Here the quantum is
//! 1, so that small jobs of different tenants alternate, and rounds are not walked but computed: a
//! tenant whose oldest job costs `c` has its turn `c` rounds ahead and stands in the slot of that round
//! until then; a bitmap tells which slot is the next that is taken. To share what waits by fair queuing
//! within each class, and the care that a tenant does not save up turns while it cannot use them
//! ("windup"), are from Kubernetes' API Priority and Fairness (KEP-1040).
//!
//! Every operation is O(1), amortised over the growth and return of memory: every order is a linked list
//! through a vector by job or by tenant, so that a job leaves the middle without a search.

use bulkhead_shared::Priority;

#[cfg(test)]
mod tests;

/// What a job is charged at most: those that ask for more share as if they asked for this much. It
/// bounds how many rounds there can be ahead, and with them the slots and the bitmap.
const COST_MAX: u32 = 4095;

/// Slots that a class has at first: one word of the bitmap.
const SLOTS_MIN: usize = 64;

/// Tables of up to this many places are kept when the queue is empty.
const KEPT_MAX: usize = 1024;

const NONE: u32 = u32::MAX;

/// The waiting jobs of one bulkhead. The numbers of jobs and tenants are to be small, since there is a
/// place for each up to the highest.
#[derive(Default)]
pub(crate) struct Queue {
    jobs: Jobs,
    /// By the code of the priority.
    classes: [Class; Priority::ALL.len()],
    ranking: Ranking,
    /// By tenant; holds as well for one that has nothing here.
    is_blocked: Vec<bool>,
    len: usize,
    /// Jobs entered since memory was last given back: they pay for doing it again.
    entered: usize,
}

impl Queue {
    /// Bytes that a job takes in the tables here.
    pub(crate) const JOB_BYTES: usize = size_of::<Option<Entry>>() + 2 * size_of::<Link>();

    /// Enters a job behind all others of its tenant and class. O(1).
    pub(crate) fn push(&mut self, job: u32, class: Priority, tenant: u32, cost: u32) {
        let cost = cost.clamp(1, COST_MAX);
        if self.jobs.enter(job, Entry { class, tenant, cost, age: self.jobs.newest + 1 }) {
            self.jobs.newest += 1;
            let is_blocked = self.is_blocked(tenant);
            self.classes[class as usize].push(&mut self.jobs, job, tenant, cost, is_blocked);
            self.count(tenant);
        }
    }

    /// Enters a job before all others of its class, tenants that are blocked aside: it had its turn and
    /// was returned unread. It was charged then, and is not charged again. O(1).
    pub(crate) fn push_first(&mut self, job: u32, class: Priority, tenant: u32) {
        if self.jobs.enter(job, Entry { class, tenant, cost: 0, age: self.jobs.oldest - 1 }) {
            self.jobs.oldest -= 1;
            let is_blocked = self.is_blocked(tenant);
            self.classes[class as usize].push_first(&mut self.jobs, job, tenant, is_blocked);
            self.count(tenant);
        }
    }

    /// Takes a job out from wherever it waits, at no charge; does nothing if it does not wait. O(1).
    pub(crate) fn remove(&mut self, job: u32) {
        self.take(job, Leave::Cancelled);
    }

    /// The job whose turn is next, among classes from `lowest` up. O(1).
    pub(crate) fn peek(&self, lowest: Priority) -> Option<u32> {
        let allowed = Priority::ALL.iter().rev().take_while(|&&class| class >= lowest);
        allowed.map(|&class| &self.classes[class as usize]).find_map(Class::next)
    }

    /// Takes out the job that [`Queue::peek`] shows, and charges its tenant. O(1).
    pub(crate) fn pop(&mut self, lowest: Priority) -> Option<u32> {
        let job = self.peek(lowest)?;
        self.take(job, Leave::Served);
        Some(job)
    }

    /// Keeps a tenant out of the rounds until it is unblocked: its jobs and its place stay, and neither
    /// does it earn anything nor lose what it has. O(1).
    pub(crate) fn block(&mut self, tenant: u32) {
        let index = tenant as usize;
        if self.is_blocked.len() <= index {
            self.is_blocked.resize(index + 1, false);
        }
        if !std::mem::replace(&mut self.is_blocked[index], true) {
            self.classes.iter_mut().for_each(|class| class.block(tenant));
        }
    }

    /// Lets a tenant take part again, first in the round in which it has its turn. O(1).
    pub(crate) fn unblock(&mut self, tenant: u32) {
        let Some(is_blocked) = self.is_blocked.get_mut(tenant as usize) else { return };
        if std::mem::replace(is_blocked, false) {
            self.classes.iter_mut().for_each(|class| class.unblock(tenant));
        }
    }

    /// How many jobs wait, those of blocked tenants included. O(1).
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How many jobs of a class wait. O(1).
    #[cfg(test)]
    pub(crate) fn len_of(&self, class: Priority) -> usize {
        self.classes[class as usize].len
    }

    /// How many jobs of a tenant wait. O(1).
    pub(crate) fn len_of_tenant(&self, tenant: u32) -> usize {
        self.ranking.len_of(tenant)
    }

    /// The job of a class that came last: the first to be shed. O(1).
    pub(crate) fn newest(&self, class: Priority) -> Option<u32> {
        some(self.classes[class as usize].by_age.last)
    }

    /// The tenant that has most jobs here; among equals, the one that has had so many the longest. O(1).
    pub(crate) fn fullest(&self) -> Option<u32> {
        self.ranking.fullest()
    }

    /// The oldest job of a tenant, of whatever class: the one to evict. O(1).
    pub(crate) fn oldest(&self, tenant: u32) -> Option<u32> {
        let of_each_class = self.classes.iter().filter_map(|class| class.oldest(tenant));
        of_each_class.min_by_key(|&job| self.jobs.get(job).map(|entry| entry.age))
    }

    fn is_blocked(&self, tenant: u32) -> bool {
        self.is_blocked.get(tenant as usize).is_some_and(|&is_blocked| is_blocked)
    }

    fn count(&mut self, tenant: u32) {
        self.ranking.add(tenant);
        self.len += 1;
        self.entered += 1;
    }

    fn take(&mut self, job: u32, leave: Leave) {
        let Some(entry) = self.jobs.leave(job) else { return };
        let is_blocked = self.is_blocked(entry.tenant);
        self.classes[entry.class as usize].remove(&mut self.jobs, job, entry, is_blocked, leave);
        self.ranking.subtract(entry.tenant);
        self.len -= 1;
        if self.len == 0 {
            self.give_back();
        }
    }

    /// Gives back what a flood has left behind. As many jobs must have come as there are places, so that
    /// one high number that comes and goes does not grow and drop a table each time.
    fn give_back(&mut self) {
        let slots = self.classes.iter().map(|class| class.rounds.slots.len()).max();
        let places = self.jobs.table.len().max(self.ranking.lens.len()).max(slots.unwrap_or(0));
        if places <= KEPT_MAX || self.entered < places {
            return;
        }
        let mut is_blocked = std::mem::take(&mut self.is_blocked);
        is_blocked.truncate(is_blocked.iter().rposition(|&is_blocked| is_blocked).map_or(0, |last| last + 1));
        is_blocked.shrink_to_fit();
        *self = Self { is_blocked, ..Self::default() };
    }
}

/// Why a job leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leave {
    /// It has its turn; its tenant pays for it.
    Served,
    /// It would wait no longer, or was made to.
    Cancelled,
}

/// What is known of a waiting job.
#[derive(Clone, Copy)]
struct Entry {
    class: Priority,
    tenant: u32,
    /// What its tenant has to earn before it goes; nothing for one that was returned.
    cost: u32,
    /// Grows with every job that comes; those that are returned count down, since they are older.
    age: i64,
}

#[derive(Default)]
struct Jobs {
    table: Vec<Option<Entry>>,
    /// The jobs of one tenant and class.
    of_flow: Links,
    /// The jobs of one class, whatever the tenant.
    of_class: Links,
    newest: i64,
    oldest: i64,
}

impl Jobs {
    /// Whether the job could be entered: it must not be here yet.
    fn enter(&mut self, job: u32, entry: Entry) -> bool {
        debug_assert!(job != NONE && entry.tenant != NONE, "{NONE} stands for none");
        let index = job as usize;
        if self.table.len() <= index {
            self.table.resize(index + 1, None);
        }
        let is_new = self.table[index].is_none();
        debug_assert!(is_new, "job {job} waits already");
        if is_new {
            self.table[index] = Some(entry);
        }
        is_new
    }

    fn leave(&mut self, job: u32) -> Option<Entry> {
        self.table.get_mut(job as usize)?.take()
    }

    fn get(&self, job: u32) -> Option<&Entry> {
        self.table.get(job as usize)?.as_ref()
    }
}

/// The jobs of one class.
#[derive(Default)]
struct Class {
    len: usize,
    by_age: List,
    /// By tenant.
    flows: Vec<Flow>,
    /// Tenants that have a turn ahead.
    rounds: Rounds,
    /// Tenants that have jobs that were returned, the latest first. They need no turn.
    returned: List,
    returned_links: Links,
}

/// The jobs of one tenant and class.
#[derive(Clone, Default)]
struct Flow {
    waiting: List,
    returned: List,
    turn: Turn,
}

/// When the oldest waiting job of a flow goes.
#[derive(Clone, Copy, Default)]
enum Turn {
    /// None waits.
    #[default]
    None,
    /// In this round.
    At(u64),
    /// So many rounds after the tenant is unblocked.
    In(u64),
}

impl Class {
    fn push(&mut self, jobs: &mut Jobs, job: u32, tenant: u32, cost: u32, is_blocked: bool) {
        self.len += 1;
        jobs.of_class.push_last(&mut self.by_age, job);
        let now = self.rounds.now;
        let flow = self.flow_mut(tenant);
        jobs.of_flow.push_last(&mut flow.waiting, job);
        if !matches!(flow.turn, Turn::None) {
            return;
        }
        let ahead = u64::from(cost);
        flow.turn = if is_blocked { Turn::In(ahead) } else { Turn::At(now + ahead) };
        if !is_blocked {
            self.rounds.insert_last(tenant, now + ahead);
        }
    }

    fn push_first(&mut self, jobs: &mut Jobs, job: u32, tenant: u32, is_blocked: bool) {
        self.len += 1;
        jobs.of_class.push_first(&mut self.by_age, job);
        let flow = self.flow_mut(tenant);
        let is_listed = !is_blocked && !flow.returned.is_empty();
        jobs.of_flow.push_first(&mut flow.returned, job);
        if is_listed {
            self.returned_links.remove(&mut self.returned, tenant);
        }
        if !is_blocked {
            self.returned_links.push_first(&mut self.returned, tenant);
        }
    }

    fn remove(&mut self, jobs: &mut Jobs, job: u32, gone: Entry, is_blocked: bool, leave: Leave) {
        self.len -= 1;
        jobs.of_class.remove(&mut self.by_age, job);
        let flow = &mut self.flows[gone.tenant as usize];
        if gone.cost == 0 {
            jobs.of_flow.remove(&mut flow.returned, job);
            if flow.returned.is_empty() && !is_blocked {
                self.returned_links.remove(&mut self.returned, gone.tenant);
            }
            return;
        }
        let was_oldest = flow.waiting.first == job;
        jobs.of_flow.remove(&mut flow.waiting, job);
        if was_oldest {
            let next = jobs.get(flow.waiting.first).map(|entry| u64::from(entry.cost));
            self.turn_of_next(gone.tenant, u64::from(gone.cost), next, leave);
        }
    }

    /// Gives a flow whose oldest job has left the turn of the next, or none. What was earned for a job
    /// that was cancelled counts for the next one, but only as far as that one costs: a tenant cannot save up.
    fn turn_of_next(&mut self, tenant: u32, gone: u64, next: Option<u64>, leave: Leave) {
        let flow = &mut self.flows[tenant as usize];
        match flow.turn {
            Turn::None => {}
            Turn::In(ahead) => {
                flow.turn = next.map_or(Turn::None, |cost| Turn::In((ahead + cost).saturating_sub(gone)));
            }
            Turn::At(turn) => {
                let since = match leave {
                    Leave::Served => {
                        self.rounds.now = turn;
                        turn
                    }
                    Leave::Cancelled => turn.saturating_sub(gone),
                };
                let next = next.map(|cost| self.rounds.now.max(since + cost));
                flow.turn = next.map_or(Turn::None, Turn::At);
                if next != Some(turn) {
                    self.rounds.shift(tenant, turn, next);
                }
            }
        }
    }

    /// The job whose turn is next.
    fn next(&self) -> Option<u32> {
        let returned = self.flow(self.returned.first).map(|flow| flow.returned.first);
        returned.or_else(|| Some(self.flow(self.rounds.first()?)?.waiting.first))
    }

    fn oldest(&self, tenant: u32) -> Option<u32> {
        let flow = self.flow(tenant)?;
        some(flow.returned.first).or(some(flow.waiting.first))
    }

    fn block(&mut self, tenant: u32) {
        let Some(flow) = self.flows.get_mut(tenant as usize) else { return };
        if let Turn::At(turn) = flow.turn {
            flow.turn = Turn::In(turn - self.rounds.now);
            self.rounds.remove(tenant, turn);
        }
        if !flow.returned.is_empty() {
            self.returned_links.remove(&mut self.returned, tenant);
        }
    }

    fn unblock(&mut self, tenant: u32) {
        let Some(flow) = self.flows.get_mut(tenant as usize) else { return };
        if let Turn::In(ahead) = flow.turn {
            let turn = self.rounds.now + ahead;
            flow.turn = Turn::At(turn);
            self.rounds.insert_first(tenant, turn);
        }
        if !flow.returned.is_empty() {
            self.returned_links.push_first(&mut self.returned, tenant);
        }
    }

    fn flow(&self, tenant: u32) -> Option<&Flow> {
        self.flows.get(tenant as usize)
    }

    fn flow_mut(&mut self, tenant: u32) -> &mut Flow {
        let index = tenant as usize;
        if self.flows.len() <= index {
            self.flows.resize(index + 1, Flow::default());
        }
        &mut self.flows[index]
    }
}

/// Which tenants have their turn in which round. No turn is further ahead than the highest cost, so that
/// a ring of slots, one for each round from now on, holds them all.
#[derive(Default)]
struct Rounds {
    /// The round of the turn that came last.
    now: u64,
    /// The tenants of each round, in order; the number of slots is a power of two.
    slots: Vec<List>,
    links: Links,
    /// A bit for each slot that is taken.
    words: Vec<u64>,
    /// A bit for each word that is not zero.
    summary: u64,
}

impl Rounds {
    fn insert_last(&mut self, tenant: u32, turn: u64) {
        self.reach(turn);
        let slot = self.mark(turn);
        self.links.push_last(&mut self.slots[slot], tenant);
    }

    fn insert_first(&mut self, tenant: u32, turn: u64) {
        self.reach(turn);
        let slot = self.mark(turn);
        self.links.push_first(&mut self.slots[slot], tenant);
    }

    fn remove(&mut self, tenant: u32, turn: u64) {
        let slot = self.slot(turn);
        self.links.remove(&mut self.slots[slot], tenant);
        if self.slots[slot].is_empty() {
            self.words[slot / 64] &= !(1 << (slot % 64));
            self.summary &= !(u64::from(self.words[slot / 64] == 0) << (slot / 64));
        }
    }

    /// Moves a tenant from one round behind the others of another, or out.
    fn shift(&mut self, tenant: u32, from: u64, to: Option<u64>) {
        self.remove(tenant, from);
        if let Some(turn) = to {
            self.insert_last(tenant, turn);
        }
    }

    /// The tenant whose turn is next.
    fn first(&self) -> Option<u32> {
        if self.summary == 0 {
            return None;
        }
        let (word, bit) = (self.slot(self.now) / 64, self.slot(self.now) % 64);
        let ahead = self.words[word] & (u64::MAX << bit);
        if ahead != 0 {
            return some(self.slots[word * 64 + ahead.trailing_zeros() as usize].first);
        }
        // The words after it, and at last, once around, itself again.
        let turned = self.summary.rotate_right(word as u32 + 1);
        let word = (word + 1 + turned.trailing_zeros() as usize) % 64;
        some(self.slots[word * 64 + self.words[word].trailing_zeros() as usize].first)
    }

    fn slot(&self, turn: u64) -> usize {
        turn as usize & self.slots.len().wrapping_sub(1)
    }

    fn mark(&mut self, turn: u64) -> usize {
        let slot = self.slot(turn);
        self.words[slot / 64] |= 1 << (slot % 64);
        self.summary |= 1 << (slot / 64);
        slot
    }

    /// Sees to it that there is a slot for a turn. It grows a few times at most, see [`COST_MAX`].
    fn reach(&mut self, turn: u64) {
        let ahead = turn.saturating_sub(self.now) as usize;
        debug_assert!(ahead <= COST_MAX as usize, "no turn is {ahead} rounds ahead");
        if ahead < self.slots.len() {
            return;
        }
        let len = (ahead + 1).next_power_of_two().max(SLOTS_MIN);
        let old = std::mem::replace(&mut self.slots, vec![List::default(); len]);
        self.words = vec![0; len / 64];
        self.summary = 0;
        for turn in self.now..self.now + old.len() as u64 {
            step();
            let list = old[turn as usize & (old.len() - 1)];
            if !list.is_empty() {
                let slot = self.mark(turn);
                self.slots[slot] = list;
            }
        }
    }
}

/// Tenants by how many jobs they have here. A count moves by one at a time, which is what keeps the
/// highest known.
#[derive(Default)]
struct Ranking {
    /// By tenant.
    lens: Vec<usize>,
    links: Links,
    /// The tenants that have one job, two jobs and so on, up to the most that any has.
    ranks: Vec<List>,
}

impl Ranking {
    fn add(&mut self, tenant: u32) {
        let index = tenant as usize;
        if self.lens.len() <= index {
            self.lens.resize(index + 1, 0);
        }
        let len = self.lens[index];
        if len > 0 {
            self.links.remove(&mut self.ranks[len - 1], tenant);
        }
        if self.ranks.len() == len {
            self.ranks.push(List::default());
        }
        self.links.push_last(&mut self.ranks[len], tenant);
        self.lens[index] += 1;
    }

    /// Takes a job off a tenant that has one.
    fn subtract(&mut self, tenant: u32) {
        let index = tenant as usize;
        self.lens[index] -= 1;
        let len = self.lens[index];
        self.links.remove(&mut self.ranks[len], tenant);
        if len > 0 {
            self.links.push_last(&mut self.ranks[len - 1], tenant);
        }
        self.ranks.pop_if(|rank| rank.is_empty());
    }

    fn len_of(&self, tenant: u32) -> usize {
        self.lens.get(tenant as usize).copied().unwrap_or(0)
    }

    fn fullest(&self) -> Option<u32> {
        some(self.ranks.last()?.first)
    }
}

/// The ends of a linked list.
#[derive(Clone, Copy)]
struct List {
    first: u32,
    last: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

impl List {
    fn is_empty(self) -> bool {
        self.first == NONE
    }
}

/// The links of lists over the same numbers; a number is in one of them at most.
#[derive(Default)]
struct Links(Vec<Link>);

#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

impl Links {
    fn push_last(&mut self, list: &mut List, item: u32) {
        self.insert(list, item, Link { before: list.last, after: NONE });
    }

    fn push_first(&mut self, list: &mut List, item: u32) {
        self.insert(list, item, Link { before: NONE, after: list.first });
    }

    fn insert(&mut self, list: &mut List, item: u32, link: Link) {
        let index = item as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, Link { before: NONE, after: NONE });
        }
        self.0[index] = link;
        *self.after(list, link.before) = item;
        *self.before(list, link.after) = item;
    }

    /// Takes out an item that is in this list.
    fn remove(&mut self, list: &mut List, item: u32) {
        let link = self.0[item as usize];
        *self.after(list, link.before) = link.after;
        *self.before(list, link.after) = link.before;
    }

    /// What says which item comes after this one; with none before it, which is the first.
    fn after<'a>(&'a mut self, list: &'a mut List, item: u32) -> &'a mut u32 {
        step();
        if item == NONE { &mut list.first } else { &mut self.0[item as usize].after }
    }

    /// What says which item comes before this one; with none after it, which is the last.
    fn before<'a>(&'a mut self, list: &'a mut List, item: u32) -> &'a mut u32 {
        step();
        if item == NONE { &mut list.last } else { &mut self.0[item as usize].before }
    }
}

/// A number that is not [`NONE`].
fn some(number: u32) -> Option<u32> {
    (number != NONE).then_some(number)
}

/// One step of work, counted by the tests that hold the queue to be O(1).
fn step() {
    #[cfg(test)]
    tests::count_step();
}
