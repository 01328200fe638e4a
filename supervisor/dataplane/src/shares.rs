//! How much of the memory for what waits each holder has, and which has to give some of it back when another needs room.
//!
//! Holders are a tree: users, their connections, the bulkheads that these have jobs in. One alone may hold
//! everything. When there is no room left, a holder below an equal share of what its parent has gets room
//! nevertheless, and the one furthest over its share gives: half-received frames first, then waiting jobs.
//! It counts and chooses; it knows nothing of sessions and jobs, and frees nothing itself.

use super::slab::{BulkheadIndex, SlabIndex};
use std::collections::{BTreeSet, HashMap};

use foldhash::quality::RandomState;

/// A place in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Holder(u32);

const ROOT: Holder = Holder(0);

/// A holder, at the top.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// Clients of this user.
    User(u32),
    /// What is on its way to workers, and cannot be given back.
    Workers,
}

/// What is held: whether, and how, it can be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A half-received frame that can be thrown away.
    Frame,
    /// A waiting job.
    Job,
    /// It goes when its time comes.
    Fixed,
}

/// The holder that is to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Giver {
    /// Its half-received frame; it is a connection, or what one holds in a bulkhead.
    Frame(Holder),
    /// This connection and bulkhead its newest waiting job of the lowest class.
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
    /// What its parent knows it by.
    key: u64,
    held: Bytes,
    /// By key.
    children: HashMap<u64, Holder, RandomState>,
    /// How many of them hold something.
    active: usize,
    /// Those by how much; kept only while room is short.
    order: BTreeSet<(usize, Holder)>,
    /// Whether it is to stay although it holds nothing.
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
    /// A connection of an owner, until [`Shares::close`].
    pub(super) fn open(&mut self, owner: Owner, connection: u64) -> Holder {
        let key = match owner {
            Owner::User(uid) => u64::from(uid),
            Owner::Workers => u64::MAX,
        };
        let owner = self.child(ROOT, key);
        let connection = self.child(owner, connection);
        self.node(connection).is_open = true;
        connection
    }

    /// It is forgotten as soon as nothing is held for it.
    pub(super) fn close(&mut self, connection: Holder) {
        self.node(connection).is_open = false;
        let idle: Vec<Holder> = self.node(connection).children.values().copied().collect();
        match idle.is_empty() {
            true => self.forget(connection),
            // It goes with the last of them.
            false => idle.into_iter().for_each(|leaf| self.forget(leaf)),
        }
    }

    /// What a connection holds in a bulkhead. It stays as long as the connection, or something is held.
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
            debug_assert!(*held >= by, "more is given back than was held");
            *held = held.saturating_sub(by);
        });
        self.forget(holder);
    }

    /// Whether a connection may hold so much more for a bulkhead: there is room, or at one of the levels it would
    /// stay within an equal share, so that another gives.
    pub(super) fn may_have(
        &self,
        connection: Holder,
        bulkhead: Option<BulkheadIndex>,
        more: usize,
        most: usize,
    ) -> bool {
        self.held().saturating_add(more) <= most || self.scope(connection, bulkhead, more, most).is_some()
    }

    /// Of those that hold what a connection holds for a bulkhead, the highest that would stay within an equal share
    /// with so much more: its parent, whose other children are to give.
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

    /// What the children of a holder share.
    fn room(&self, parent: Holder, most: usize) -> usize {
        if parent == ROOT { most } else { self.bytes(parent).all.min(most) }
    }

    /// The connection that a holder is, or is of.
    pub(super) fn connection(&self, holder: Holder) -> Holder {
        let parent = self.nodes[holder.0 as usize].parent;
        if self.nodes[parent.0 as usize].parent == ROOT { holder } else { parent }
    }

    /// What each owner may hold whatever the others do.
    pub(super) fn equal_share(&self, most: usize) -> usize {
        most / self.nodes[0].active.max(1)
    }

    /// The giver when more than `most` is held, to make room for what a connection holds for a bulkhead; `None` if it
    /// is not, or only by what cannot be given, or by holders that are within their share.
    pub(super) fn giver(
        &mut self,
        wants: Option<(Holder, Option<BulkheadIndex>)>,
        most: usize,
    ) -> Option<Giver> {
        if self.held() <= most {
            if self.is_ordered && self.held() < most / 2 {
                self.is_ordered = false;
                self.nodes.iter_mut().for_each(|node| node.order = BTreeSet::new());
            }
            return None;
        }
        if !self.is_ordered {
            self.put_in_order();
        }
        let scope = wants.and_then(|(connection, bulkhead)| self.scope(connection, bulkhead, 0, most));
        self.giver_in(scope.unwrap_or(ROOT), most).or_else(|| self.giver_in(ROOT, most))
    }

    /// The child that is furthest over its share gives: first a frame, whichever is the largest.
    fn giver_in(&self, parent: Holder, most: usize) -> Option<Giver> {
        let share = self.room(parent, most) / self.nodes[parent.0 as usize].active.max(1);
        let mut over = self.most_first(parent).take_while(|&child| self.bytes(child).all > share);
        let mut giver = over.find(|&child| self.bytes(child).frames + self.bytes(child).jobs > 0)?;
        let has_frames = self.bytes(giver).frames > 0;
        let given =
            |child: Holder| if has_frames { self.bytes(child).frames } else { self.bytes(child).jobs };
        loop {
            let mut children = self.most_first(giver).filter(|&child| given(child) > 0);
            let next = if has_frames { children.max_by_key(|&child| given(child)) } else { children.next() };
            match next {
                Some(child) => giver = child,
                None if has_frames => return Some(Giver::Frame(giver)),
                None => return Some(Giver::Job(giver)),
            }
        }
    }

    fn bytes(&self, holder: Holder) -> Bytes {
        self.nodes[holder.0 as usize].held
    }

    fn most_first(&self, parent: Holder) -> impl Iterator<Item = Holder> {
        self.nodes[parent.0 as usize].order.iter().rev().map(|&(_, holder)| holder)
    }

    fn put_in_order(&mut self) {
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

    /// Removes a holder of nothing, and those above it that are no more than that.
    fn forget(&mut self, holder: Holder) {
        let mut at = holder;
        while at != ROOT {
            let node = &self.nodes[at.0 as usize];
            let (key, parent) = (node.key, node.parent);
            // What a connection holds in a bulkhead is worth its place for as long as there is the connection.
            let is_kept = node.is_open || self.nodes[parent.0 as usize].is_open && parent != ROOT;
            if is_kept || node.held.all > 0 || !node.children.is_empty() {
                return;
            }
            let above = self.node(parent);
            if above.children.get(&key) != Some(&at) {
                debug_assert!(false, "a holder is forgotten twice");
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
