//! The waiting jobs of one bulkhead, and the choice of the next job. Classes are served strictly by priority. Within a
//! class, tenants take turns and get equal shares by cost. Within a tenant, the oldest job comes first. The queue knows
//! only a job's number, class, tenant and cost, and never rejects a job.
//!
//! Within a class, the order is deficit round robin (Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit
//! Round Robin", 1995). In each round, every tenant earns a quantum, and the tenant's oldest job is served once its
//! cost has been earned. In the paper, the quantum is as large as the largest job. Each visit then serves at least one
//! job, but many small jobs of the same tenant run one after another. Here, the quantum is 1, so that small jobs of
//! different tenants alternate. Instead of visiting each round, the queue computes the round in which a job is served.
//! A tenant whose oldest job costs `c` has its turn `c` rounds later and is stored in the slot for that round. A bitmap
//! shows the next occupied slot. Two ideas come from Kubernetes' API Priority and Fairness (KEP-1040): fair queuing
//! within a class, and the rule that a tenant cannot save up unused turns ("windup").
//!
//! Every operation is O(1), amortised over the growth and release of memory. Each order is a linked list in a vector
//! indexed by job or tenant, so that a job can be removed from the middle without a search.

use bulkhead_shared::Priority;

#[cfg(test)]
mod tests;

/// Maximum cost charged for a job. This maximum limits how many rounds ahead a tenant's turn can be, and thus the
/// number of slots and the size of the bitmap.
const COST_MAX: u32 = 4095;

/// Initial number of slots in each class. There is one slot per round, and one bitmap word covers this number of slots.
const SLOTS_MIN: usize = 64;

/// Maximum number of entries in a table that is never shrunk.
const RETAINED_LEN_MAX: usize = 1024;

const NONE: u32 = u32::MAX;

/// The waiting jobs of one bulkhead. Job and tenant numbers should be small, because each table has an entry for every
/// number up to the highest one.
#[derive(Default)]
pub(crate) struct Queue {
    jobs: Jobs,
    /// Waiting jobs of each priority class, indexed by priority code.
    classes: [Class; Priority::ALL.len()],
    ranking: Ranking,
    /// True for each tenant that is blocked, indexed by tenant number. Includes tenants without waiting jobs.
    is_blocked: Vec<bool>,
    len: usize,
    /// Number of jobs added since memory was last released. Memory is released only after many jobs have been added, so
    /// that the amortised cost is low.
    added: usize,
}

impl Queue {
    /// Memory used by a job's table entries, in bytes.
    pub(crate) const JOB_BYTES: usize = size_of::<Option<Entry>>() + 2 * size_of::<Link>();

    /// Adds a job after all other jobs of the same tenant and class. O(1).
    pub(crate) fn push(&mut self, job: u32, class: Priority, tenant: u32, cost: u32) {
        let cost = cost.clamp(1, COST_MAX);
        if self.jobs.enter(job, Entry { class, tenant, cost, age: self.jobs.newest + 1 }) {
            self.jobs.newest += 1;
            let is_blocked = self.is_blocked(tenant);
            self.classes[class as usize].push(&mut self.jobs, job, tenant, cost, is_blocked);
            self.count(tenant);
        }
    }

    /// Adds a job ahead of all other jobs of its class. A blocked tenant stays blocked. The tenant is not charged
    /// again, because it was charged when the job was first served. O(1).
    pub(crate) fn push_first(&mut self, job: u32, class: Priority, tenant: u32) {
        if self.jobs.enter(job, Entry { class, tenant, cost: 0, age: self.jobs.oldest - 1 }) {
            self.jobs.oldest -= 1;
            let is_blocked = self.is_blocked(tenant);
            self.classes[class as usize].push_first(&mut self.jobs, job, tenant, is_blocked);
            self.count(tenant);
        }
    }

    /// Removes a waiting job without charging the job's tenant. Does nothing if the job is not waiting. O(1).
    pub(crate) fn remove(&mut self, job: u32) {
        self.take(job, Removal::Cancelled);
    }

    /// Returns the next job whose class is `lowest` or higher. O(1).
    pub(crate) fn peek(&self, lowest: Priority) -> Option<u32> {
        let allowed = Priority::ALL.iter().rev().take_while(|&&class| class >= lowest);
        allowed.map(|&class| &self.classes[class as usize]).find_map(Class::next)
    }

    /// Removes and returns the job that [`Queue::peek`] would return, and charges the job's tenant. O(1).
    pub(crate) fn pop(&mut self, lowest: Priority) -> Option<u32> {
        let job = self.peek(lowest)?;
        self.take(job, Removal::Served);
        Some(job)
    }

    /// Blocks a tenant. The tenant's jobs stay in the queue but are skipped. The tenant keeps its position in
    /// the rounds, and neither gains nor loses turns. O(1).
    pub(crate) fn block(&mut self, tenant: u32) {
        let index = tenant as usize;
        if self.is_blocked.len() <= index {
            self.is_blocked.resize(index + 1, false);
        }
        if !std::mem::replace(&mut self.is_blocked[index], true) {
            self.classes.iter_mut().for_each(|class| class.block(tenant));
        }
    }

    /// Unblocks a tenant. The tenant is served first in the round in which its next turn falls. O(1).
    pub(crate) fn unblock(&mut self, tenant: u32) {
        let Some(is_blocked) = self.is_blocked.get_mut(tenant as usize) else { return };
        if std::mem::replace(is_blocked, false) {
            self.classes.iter_mut().for_each(|class| class.unblock(tenant));
        }
    }

    /// Returns the number of waiting jobs, including those of blocked tenants. O(1).
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of waiting jobs in a class. O(1).
    #[cfg(test)]
    pub(crate) fn len_of(&self, class: Priority) -> usize {
        self.classes[class as usize].len
    }

    /// Returns the number of waiting jobs of a tenant. O(1).
    pub(crate) fn len_of_tenant(&self, tenant: u32) -> usize {
        self.ranking.len_of(tenant)
    }

    /// Returns the newest job in a class, which is the first to be rejected if the queue is full. O(1).
    pub(crate) fn newest(&self, class: Priority) -> Option<u32> {
        some(self.classes[class as usize].by_age.last)
    }

    /// Returns the tenant with the most waiting jobs. If several tenants have the same number, returns the tenant that
    /// reached it first. O(1).
    pub(crate) fn fullest(&self) -> Option<u32> {
        self.ranking.fullest()
    }

    /// Returns a tenant's oldest job in any class, which is the first to be evicted if the queue is full. O(1).
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
        self.added += 1;
    }

    fn take(&mut self, job: u32, removal: Removal) {
        let Some(entry) = self.jobs.removal(job) else { return };
        let is_blocked = self.is_blocked(entry.tenant);
        self.classes[entry.class as usize].remove(&mut self.jobs, job, entry, is_blocked, removal);
        self.ranking.subtract(entry.tenant);
        self.len -= 1;
        if self.len == 0 {
            self.release_memory();
        }
    }

    /// Releases memory after a burst, but only after as many jobs have been added as the largest table has entries.
    /// Otherwise, repeatedly adding and removing a single job with a high number would grow and shrink a table each
    /// time.
    fn release_memory(&mut self) {
        let slots = self.classes.iter().map(|class| class.rounds.slots.len()).max();
        let places = self.jobs.table.len().max(self.ranking.lens.len()).max(slots.unwrap_or(0));
        if places <= RETAINED_LEN_MAX || self.added < places {
            return;
        }
        let mut is_blocked = std::mem::take(&mut self.is_blocked);
        is_blocked.truncate(is_blocked.iter().rposition(|&is_blocked| is_blocked).map_or(0, |last| last + 1));
        is_blocked.shrink_to_fit();
        *self = Self { is_blocked, ..Self::default() };
    }
}

/// Reason for removing a job from the queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Removal {
    /// The job was served, so its tenant is charged.
    Served,
    /// The job was cancelled or rejected.
    Cancelled,
}

/// A waiting job.
#[derive(Clone, Copy)]
struct Entry {
    class: Priority,
    tenant: u32,
    /// Credit that the tenant needs before the job can be served. Zero for a job that was returned to the queue.
    cost: u32,
    /// Position in the order of arrival. A new job gets the highest position so far. A job that is returned to the
    /// queue gets the lowest, because it counts as older than all waiting jobs.
    age: i64,
}

#[derive(Default)]
struct Jobs {
    table: Vec<Option<Entry>>,
    /// Linked lists of the jobs in each flow, which consists of one tenant's jobs in one class.
    of_flow: Links,
    /// Linked lists of all jobs in each class.
    of_class: Links,
    newest: i64,
    oldest: i64,
}

impl Jobs {
    /// Adds a job to the table and returns true. A job that is already in the table must not be added.
    fn enter(&mut self, job: u32, entry: Entry) -> bool {
        debug_assert!(
            job != NONE && entry.tenant != NONE,
            "the number {NONE} is reserved for the end of a list"
        );
        let index = job as usize;
        if self.table.len() <= index {
            self.table.resize(index + 1, None);
        }
        let is_new = self.table[index].is_none();
        debug_assert!(is_new, "job {job} is already in the queue");
        if is_new {
            self.table[index] = Some(entry);
        }
        is_new
    }

    fn removal(&mut self, job: u32) -> Option<Entry> {
        self.table.get_mut(job as usize)?.take()
    }

    fn get(&self, job: u32) -> Option<&Entry> {
        self.table.get(job as usize)?.as_ref()
    }
}

/// Waiting jobs of one class.
#[derive(Default)]
struct Class {
    len: usize,
    by_age: List,
    /// Flows, indexed by tenant.
    flows: Vec<Flow>,
    /// Tenants that are waiting for their turn.
    rounds: Rounds,
    /// Tenants whose jobs were returned to the queue, most recent first. Returned jobs are served before all other jobs
    /// in the class.
    returned: List,
    returned_links: Links,
}

/// Waiting jobs of one tenant in one class.
#[derive(Clone, Default)]
struct Flow {
    waiting: List,
    returned: List,
    turn: Turn,
}

/// Round in which the next job of a flow is served. A flow consists of one tenant's jobs in one class.
#[derive(Clone, Copy, Default)]
enum Turn {
    /// The flow has no jobs.
    #[default]
    None,
    /// The flow gets its turn in the round with this number.
    At(u64),
    /// The tenant is blocked. After it is unblocked, its turn comes after this many rounds.
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

    fn remove(&mut self, jobs: &mut Jobs, job: u32, gone: Entry, is_blocked: bool, removal: Removal) {
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
            self.turn_of_next(gone.tenant, u64::from(gone.cost), next, removal);
        }
    }

    /// Sets the turn of a flow whose oldest job was removed. If that job was cancelled, the credit accumulated for the
    /// job counts towards the flow's next job, but only up to the next job's cost, so that a tenant cannot save up
    /// turns.
    fn turn_of_next(&mut self, tenant: u32, gone: u64, next: Option<u64>, removal: Removal) {
        let flow = &mut self.flows[tenant as usize];
        match flow.turn {
            Turn::None => {}
            Turn::In(ahead) => {
                flow.turn = next.map_or(Turn::None, |cost| Turn::In((ahead + cost).saturating_sub(gone)));
            }
            Turn::At(turn) => {
                let since = match removal {
                    Removal::Served => {
                        self.rounds.now = turn;
                        turn
                    }
                    Removal::Cancelled => turn.saturating_sub(gone),
                };
                let next = next.map(|cost| self.rounds.now.max(since + cost));
                flow.turn = next.map_or(Turn::None, Turn::At);
                if next != Some(turn) {
                    self.rounds.shift(tenant, turn, next);
                }
            }
        }
    }

    /// Returns the job that is served next in this class.
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

/// Tenants, grouped by the round in which their turn comes. No turn is more rounds ahead than the maximum cost, so a
/// ring with one slot per round can hold all turns.
#[derive(Default)]
struct Rounds {
    /// Round of the most recently served job.
    now: u64,
    /// List of tenants for each round, in the order of their turns. The number of lists is a power of two.
    slots: Vec<List>,
    links: Links,
    /// Bitmap with one bit per slot. A bit is set if the slot contains a tenant.
    words: Vec<u64>,
    /// Bitmap with one bit per entry of `words`. A bit is set if the entry is not zero.
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

    /// Moves a tenant from round `from` to the end of round `to`. If `to` is `None`, only removes the tenant.
    fn shift(&mut self, tenant: u32, from: u64, to: Option<u64>) {
        self.remove(tenant, from);
        if let Some(turn) = to {
            self.insert_last(tenant, turn);
        }
    }

    /// Returns the tenant that gets the next turn.
    fn first(&self) -> Option<u32> {
        if self.summary == 0 {
            return None;
        }
        let (word, bit) = (self.slot(self.now) / 64, self.slot(self.now) % 64);
        let ahead = self.words[word] & (u64::MAX << bit);
        if ahead != 0 {
            return some(self.slots[word * 64 + ahead.trailing_zeros() as usize].first);
        }
        // Searches the following words first, then wraps around. The part of the current word before the current slot
        // is searched last.
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

    /// Grows the ring if it has no slot for the round `turn`. The ring grows only a few times; see [`COST_MAX`].
    fn reach(&mut self, turn: u64) {
        let ahead = turn.saturating_sub(self.now) as usize;
        debug_assert!(ahead <= COST_MAX as usize, "a turn must not be {ahead} rounds ahead");
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

/// Tenants, ranked by their number of waiting jobs. The number changes by only one at a time, so the highest number is
/// cheap to track.
#[derive(Default)]
struct Ranking {
    /// Number of waiting jobs, indexed by tenant.
    lens: Vec<usize>,
    links: Links,
    /// Lists of tenants with the same number of waiting jobs. The first list contains all tenants with one waiting job.
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

    /// Decrements a tenant's job count, which must be at least one.
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

/// First and last item of a linked list.
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

/// Links of several linked lists whose items are numbered in the same range. Each item is in at most one list.
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

    /// Removes an item from `list`, which must contain the item.
    fn remove(&mut self, list: &mut List, item: u32) {
        let link = self.0[item as usize];
        *self.after(list, link.before) = link.after;
        *self.before(list, link.after) = link.before;
    }

    /// Returns a reference to the link that points to the successor of `item`. For [`NONE`], this is the link to the
    /// list's first item.
    fn after<'a>(&'a mut self, list: &'a mut List, item: u32) -> &'a mut u32 {
        step();
        if item == NONE { &mut list.first } else { &mut self.0[item as usize].after }
    }

    /// Returns a reference to the link that points to the predecessor of `item`. For [`NONE`], this is the link to the
    /// list's last item.
    fn before<'a>(&'a mut self, list: &'a mut List, item: u32) -> &'a mut u32 {
        step();
        if item == NONE { &mut list.last } else { &mut self.0[item as usize].before }
    }
}

/// Converts an item number to an option. The number [`NONE`] becomes `None`.
fn some(number: u32) -> Option<u32> {
    (number != NONE).then_some(number)
}

/// Counts a step of an operation. Tests use the count to check that operations are O(1).
fn step() {
    #[cfg(test)]
    tests::count_step();
}
