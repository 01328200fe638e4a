//! Who holds how much of the memory for what waits, and who has to give some of it back when another needs room.
//!
//! Holders are a tree: users, their connections, the bulkheads that these have jobs in. One alone may hold
//! everything. When there is no room left, a holder below an equal share of what its parent has gets room
//! nevertheless, and the one furthest over its share gives: half-received frames first, then waiting jobs.
//! It counts and chooses; it knows nothing of sessions and jobs, and frees nothing itself.

use std::collections::{BTreeSet, HashMap};

use foldhash::quality::RandomState;

/// A place in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Holder(u32);

const ROOT: Holder = Holder(0);

/// Who holds, at the top.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// Clients of this user.
    User(u32),
    /// What is on its way to workers, and nobody can give back.
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

/// Who is to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Giver {
    /// This connection its half-received frame.
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
        idle.into_iter().for_each(|leaf| self.forget(leaf));
        self.forget(connection);
    }

    /// What a connection holds in a bulkhead. It stays as long as the connection, or something is held.
    pub(super) fn leaf(&mut self, connection: Holder, bulkhead: usize) -> Holder {
        self.child(connection, bulkhead as u64)
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
        bulkhead: Option<usize>,
        more: usize,
        most: usize,
    ) -> bool {
        if self.held().saturating_add(more) <= most {
            return true;
        }
        let entry = &self.nodes[connection.0 as usize];
        let owner = &self.nodes[entry.parent.0 as usize];
        let is_within = |held: usize, parent: &Node, room: usize| {
            let sharers = parent.active + usize::from(held == 0);
            held.saturating_add(more) <= room / sharers.max(1)
        };
        is_within(owner.held.all, &self.nodes[0], most)
            || is_within(entry.held.all, owner, owner.held.all.min(most))
            || bulkhead.is_some_and(|bulkhead| {
                let leaf = entry.children.get(&(bulkhead as u64));
                let held = leaf.map_or(0, |leaf| self.nodes[leaf.0 as usize].held.all);
                is_within(held, entry, entry.held.all.min(most))
            })
    }

    /// What each owner may hold whatever the others do.
    pub(super) fn equal_share(&self, most: usize) -> usize {
        most / self.nodes[0].active.max(1)
    }

    /// Who gives when more than `most` is held; `None` if it is not, or only by what cannot be given, or by owners
    /// that are within their share.
    pub(super) fn giver(&mut self, most: usize) -> Option<Giver> {
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
        let share = self.equal_share(most);
        let over = self.most_first(ROOT).take_while(|&owner| self.bytes(owner).all > share);
        let owner = { over }.find(|&owner| self.bytes(owner).frames + self.bytes(owner).jobs > 0)?;
        if self.bytes(owner).frames > 0 {
            return self.most_first(owner).max_by_key(|&it| self.bytes(it).frames).map(Giver::Frame);
        }
        let has_jobs = |holder: &Holder| self.bytes(*holder).jobs > 0;
        let connection = self.most_first(owner).find(has_jobs)?;
        self.most_first(connection).find(has_jobs).map(Giver::Job)
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
