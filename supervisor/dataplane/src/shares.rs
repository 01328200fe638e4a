//! Tracks how much of the memory for waiting data each holder uses. Chooses the holder that must free memory when
//! another holder needs memory.
//!
//! Holders form a tree: users, a user's connections, and the bulkheads in which a connection has jobs. A single holder
//! can have all the memory. When the memory is exhausted, a holder with less than an equal share of its parent's memory
//! can still get some. The holder that exceeds its equal share the most must then free memory: incomplete frames first,
//! then waiting jobs. This module only counts and chooses; it does not free any memory.

use super::slab::{BulkheadIndex, SlabIndex};
use std::collections::{BTreeSet, HashMap};

use foldhash::quality::RandomState;

/// Index of a memory holder in the tree of holders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Holder(u32);

const ROOT: Holder = Holder(0);

/// A holder at the top level of the tree of memory holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// All clients of a user.
    User(u32),
    /// Jobs submitted over HTTP with a token, identified by its number.
    Token(u32),
    /// Frames that were sent to workers but that the workers have not read yet. This memory cannot be freed.
    Workers,
}

/// Kind of memory. The kind determines in which way the memory can be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An incomplete frame that can be discarded.
    Frame,
    /// A waiting job, which can be rejected.
    Job,
    /// Memory that cannot be freed while it is in use.
    Fixed,
}

/// Memory that must be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eviction {
    /// An incomplete frame. The holder is the connection on which the frame is arriving, or the bulkhead charged
    /// for the frame.
    Frame(Holder),
    /// The newest waiting job with the lowest priority, among the jobs submitted over one connection to one
    /// bulkhead.
    Job(Holder),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bytes {
    all: usize,
    frames: usize,
    jobs: usize,
}

impl Bytes {
    fn of(kind: Kind, bytes: usize) -> Self {
        let of = |it: Kind| if kind == it { bytes } else { 0 };
        Self { all: bytes, frames: of(Kind::Frame), jobs: of(Kind::Job) }
    }
}

#[derive(Default)]
struct Node {
    parent: Holder,
    /// Key under which the parent stores this node in `children`.
    key: u64,
    held: Bytes,
    children: HashMap<u64, Holder, RandomState>,
    /// Number of child nodes that hold memory.
    active: usize,
    /// Child nodes that hold memory, ordered by the amount held. Maintained only while memory is scarce.
    order: BTreeSet<(usize, Holder)>,
    /// True if the node must be kept even if it holds no memory.
    is_open: bool,
}

pub(super) struct Shares {
    nodes: Vec<Node>,
    free: Vec<Holder>,
    is_ordered: bool,
}

impl Default for Shares {
    fn default() -> Self {
        let root = Node { is_open: true, ..Node::default() };
        Self { nodes: vec![root], free: Vec::new(), is_ordered: false }
    }
}

impl Shares {
    /// Adds a node for one of an owner's connections. The node is kept at least until [`Shares::close`] is called.
    pub(super) fn open(&mut self, owner: Owner, connection: u64) -> Holder {
        let key = match owner {
            Owner::User(uid) => u64::from(uid),
            Owner::Token(id) => 1 << 32 | u64::from(id),
            Owner::Workers => u64::MAX,
        };
        let owner = self.child(ROOT, key);
        let connection = self.child(owner, connection);
        self.node(connection).is_open = true;
        connection
    }

    /// Closes a connection. The connection's node is removed once it holds no memory.
    pub(super) fn close(&mut self, connection: Holder) {
        self.node(connection).is_open = false;
        let idle: Vec<Holder> = self.node(connection).children.values().copied().collect();
        match idle.is_empty() {
            true => self.forget(connection),
            // The connection is removed together with its last child.
            false => idle.into_iter().for_each(|leaf| self.forget(leaf)),
        }
    }

    /// Returns the holder for a connection in a bulkhead. The node is kept until the connection is closed and its
    /// memory is released.
    pub(super) fn leaf(&mut self, connection: Holder, bulkhead: BulkheadIndex) -> Holder {
        self.child(connection, bulkhead.number() as u64)
    }

    pub(super) fn held(&self) -> usize {
        self.nodes[0].held.all
    }

    pub(super) fn add(&mut self, holder: Holder, kind: Kind, bytes: usize) {
        self.change(holder, Bytes::of(kind, bytes), |held, by| *held += by);
    }

    pub(super) fn subtract(&mut self, holder: Holder, kind: Kind, bytes: usize) {
        self.change(holder, Bytes::of(kind, bytes), |held, by| {
            debug_assert!(*held >= by, "more bytes were released than were held");
            *held = held.saturating_sub(by);
        });
        self.forget(holder);
    }

    /// Returns true if a connection can hold `more` additional bytes for a bulkhead. This is the case if there is
    /// enough memory, or if at some level of the tree the holder would stay within an equal share, so that another
    /// holder must free memory.
    pub(super) fn can_hold_share(
        &self,
        connection: Holder,
        bulkhead: Option<BulkheadIndex>,
        more: usize,
        most: usize,
    ) -> bool {
        self.held().saturating_add(more) <= most || self.scope(connection, bulkhead, more, most).is_some()
    }

    /// Finds the highest level of the tree at which the holder would stay within an equal share after adding `more`
    /// bytes. Returns the parent at this level. The parent's other children must free memory.
    fn scope(
        &self,
        connection: Holder,
        bulkhead: Option<BulkheadIndex>,
        more: usize,
        most: usize,
    ) -> Option<Holder> {
        let owner = self.nodes[connection.0 as usize].parent;
        let leaf = bulkhead.map(|bulkhead| {
            let children = &self.nodes[connection.0 as usize].children;
            children.get(&(bulkhead.number() as u64)).map_or(0, |&leaf| self.bytes(leaf).all)
        });
        let levels = [
            (ROOT, Some(self.bytes(owner).all)),
            (owner, Some(self.bytes(connection).all)),
            (connection, leaf),
        ];
        let is_within = |&(parent, held): &(Holder, Option<usize>)| {
            held.is_some_and(|held| {
                let sharers = self.nodes[parent.0 as usize].active + usize::from(held == 0);
                held.saturating_add(more) <= self.room(parent, most) / sharers.max(1)
            })
        };
        levels.iter().find(|level| is_within(level)).map(|&(parent, _)| parent)
    }

    /// Returns the amount of memory to divide among a holder's children, in bytes.
    fn room(&self, parent: Holder, most: usize) -> usize {
        if parent == ROOT { most } else { self.bytes(parent).all.min(most) }
    }

    /// Returns the connection to which a holder belongs. If the holder is a connection itself, returns the
    /// holder.
    pub(super) fn connection(&self, holder: Holder) -> Holder {
        let parent = self.nodes[holder.0 as usize].parent;
        if self.nodes[parent.0 as usize].parent == ROOT { holder } else { parent }
    }

    /// Returns the number of bytes that an owner can always hold, regardless of other owners.
    pub(super) fn equal_share(&self, most: usize) -> usize {
        most / self.nodes[0].active.max(1)
    }

    /// Chooses memory to free if more than `most` bytes are held. `wants` contains the connection and the bulkhead that
    /// need the memory. Returns `None` if the limit is not exceeded, or if the holders that exceed their equal share
    /// have no memory that can be freed.
    pub(super) fn next_eviction(
        &mut self,
        wants: Option<(Holder, Option<BulkheadIndex>)>,
        most: usize,
    ) -> Option<Eviction> {
        if self.held() <= most {
            if self.is_ordered && self.held() < most / 2 {
                self.is_ordered = false;
                self.nodes.iter_mut().for_each(|node| node.order = BTreeSet::new());
            }
            return None;
        }
        if !self.is_ordered {
            self.build_order();
        }
        let scope = wants.and_then(|(connection, bulkhead)| self.scope(connection, bulkhead, 0, most));
        self.eviction_below(scope.unwrap_or(ROOT), most).or_else(|| self.eviction_below(ROOT, most))
    }

    /// Chooses memory to free from the child that exceeds its equal share the most. This is the child's largest frame
    /// or, if the child has no frame, a job.
    fn eviction_below(&self, parent: Holder, most: usize) -> Option<Eviction> {
        let share = self.room(parent, most) / self.nodes[parent.0 as usize].active.max(1);
        let mut over = self.largest_first(parent).take_while(|&child| self.bytes(child).all > share);
        let mut next_eviction = over.find(|&child| self.bytes(child).frames + self.bytes(child).jobs > 0)?;
        let has_frames = self.bytes(next_eviction).frames > 0;
        let given =
            |child: Holder| if has_frames { self.bytes(child).frames } else { self.bytes(child).jobs };
        loop {
            let mut children = self.largest_first(next_eviction).filter(|&child| given(child) > 0);
            let next = if has_frames { children.max_by_key(|&child| given(child)) } else { children.next() };
            match next {
                Some(child) => next_eviction = child,
                None if has_frames => return Some(Eviction::Frame(next_eviction)),
                None => return Some(Eviction::Job(next_eviction)),
            }
        }
    }

    fn bytes(&self, holder: Holder) -> Bytes {
        self.nodes[holder.0 as usize].held
    }

    fn largest_first(&self, parent: Holder) -> impl Iterator<Item = Holder> {
        self.nodes[parent.0 as usize].order.iter().rev().map(|&(_, holder)| holder)
    }

    fn build_order(&mut self) {
        self.is_ordered = true;
        for index in 1..self.nodes.len() {
            let (held, parent) = (self.nodes[index].held.all, self.nodes[index].parent);
            if held > 0 {
                self.node(parent).order.insert((held, Holder(index as u32)));
            }
        }
    }

    fn node(&mut self, holder: Holder) -> &mut Node {
        &mut self.nodes[holder.0 as usize]
    }

    fn child(&mut self, parent: Holder, key: u64) -> Holder {
        if let Some(&found) = self.node(parent).children.get(&key) {
            return found;
        }
        let holder = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            Holder(self.nodes.len() as u32 - 1)
        });
        *self.node(holder) = Node { parent, key, ..Node::default() };
        self.node(parent).children.insert(key, holder);
        holder
    }

    fn change(&mut self, holder: Holder, by: Bytes, apply: impl Fn(&mut usize, usize)) {
        let mut at = holder;
        loop {
            let node = self.node(at);
            let (before, parent) = (node.held.all, node.parent);
            apply(&mut node.held.all, by.all);
            apply(&mut node.held.frames, by.frames);
            apply(&mut node.held.jobs, by.jobs);
            let after = node.held.all;
            if at == ROOT {
                return;
            }
            let is_ordered = self.is_ordered;
            let above = self.node(parent);
            above.active = above.active + usize::from(after > 0) - usize::from(before > 0);
            if is_ordered && before != after {
                above.order.remove(&(before, at));
                if after > 0 {
                    above.order.insert((after, at));
                }
            }
            at = parent;
        }
    }

    /// Removes a holder if it is empty, and then all ancestors that become empty as a result.
    fn forget(&mut self, holder: Holder) {
        let mut at = holder;
        while at != ROOT {
            let node = &self.nodes[at.0 as usize];
            let (key, parent) = (node.key, node.parent);
            // A bulkhead's node is kept while the connection is open.
            let is_kept = node.is_open || self.nodes[parent.0 as usize].is_open && parent != ROOT;
            if is_kept || node.held.all > 0 || !node.children.is_empty() {
                return;
            }
            let above = self.node(parent);
            if above.children.get(&key) != Some(&at) {
                debug_assert!(false, "the holder was already removed");
                return;
            }
            above.children.remove(&key);
            if above.children.is_empty() {
                above.children = HashMap::default();
            }
            self.free.push(at);
            at = parent;
        }
    }
}

#[cfg(test)]
mod tests;
