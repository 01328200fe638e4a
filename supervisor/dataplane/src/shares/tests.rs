use std::collections::BTreeMap;

use super::*;

fn place(number: usize) -> BulkheadIndex {
    BulkheadIndex::from_number(number)
}

/// Deterministic random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % most as u64) as usize
    }
}

/// Simple reference model of `Shares`. Stores the number of bytes held by each user, connection and bulkhead.
#[derive(Default)]
struct Plain {
    held: BTreeMap<(u32, u64, usize), (usize, usize)>,
}

impl Plain {
    fn total(&self, fits: impl Fn(&(u32, u64, usize)) -> bool) -> usize {
        self.held.iter().filter(|(key, _)| fits(key)).map(|(_, (jobs, fixed))| jobs + fixed).sum()
    }

    fn jobs(&self, fits: impl Fn(&(u32, u64, usize)) -> bool) -> usize {
        self.held.iter().filter(|(key, _)| fits(key)).map(|(_, (jobs, _))| jobs).sum()
    }

    fn distinct<K: Ord>(&self, of: impl Fn(&(u32, u64, usize)) -> Option<K>) -> usize {
        let held = self.held.iter().filter(|(_, (jobs, fixed))| jobs + fixed > 0);
        held.filter_map(|(key, _)| of(key)).collect::<BTreeSet<_>>().len()
    }

    fn can_hold_share(
        &self,
        (user, connection, bulkhead): (u32, u64, usize),
        more: usize,
        most: usize,
    ) -> bool {
        let within = |held: usize, sharers: usize, room: usize| {
            held + more <= room / (sharers + usize::from(held == 0)).max(1)
        };
        let of_user = self.total(|key| key.0 == user);
        let of_connection = self.total(|key| (key.0, key.1) == (user, connection));
        let of_leaf = self.total(|key| *key == (user, connection, bulkhead));
        self.total(|_| true) + more <= most
            || within(of_user, self.distinct(|key| Some(key.0)), most)
            || within(of_connection, self.distinct(|key| (key.0 == user).then_some(key.1)), of_user.min(most))
            || within(
                of_leaf,
                self.distinct(|key| ((key.0, key.1) == (user, connection)).then_some(key.2)),
                of_connection.min(most),
            )
    }
}

#[test]
fn shares_match_a_simple_model() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let most = 1000 + random.below(3000);
        let (mut shares, mut plain) = (Shares::default(), Plain::default());
        let mut open: BTreeMap<(u32, u64), Holder> = BTreeMap::new();
        for _ in 0..400 {
            let (user, connection, bulkhead) =
                (random.below(4) as u32, random.below(4) as u64, random.below(3));
            let key = (user, connection, bulkhead);
            let holder = *open
                .entry((user, connection))
                .or_insert_with(|| shares.open(Owner::User(user), u64::from(user) * 100 + connection));
            let more = 1 + random.below(most / 4);
            assert_eq!(
                shares.can_hold_share(holder, Some(place(bulkhead)), more, most),
                plain.can_hold_share(key, more, most)
            );
            let entry = plain.held.entry(key).or_default();
            match random.below(4) {
                0 | 1 => {
                    let is_job = random.below(5) > 0;
                    let (kind, held) =
                        if is_job { (Kind::Job, &mut entry.0) } else { (Kind::Fixed, &mut entry.1) };
                    *held += more;
                    let leaf = shares.leaf(holder, place(bulkhead));
                    shares.add(leaf, kind, more);
                }
                2 => {
                    let leaf = shares.leaf(holder, place(bulkhead));
                    let (jobs, fixed) = std::mem::take(entry);
                    shares.subtract(leaf, Kind::Job, jobs);
                    let leaf = shares.leaf(holder, place(bulkhead));
                    shares.subtract(leaf, Kind::Fixed, fixed);
                }
                _ if plain.total(|it| (it.0, it.1) == (user, connection)) == 0 => {
                    shares.close(holder);
                    open.remove(&(user, connection));
                }
                _ => {}
            }
            assert_eq!(shares.held(), plain.total(|_| true));
            check_giver(&mut shares, &plain, most);
        }
        for ((user, connection), holder) in open {
            for bulkhead in 0..3 {
                let (jobs, fixed) = plain.held.remove(&(user, connection, bulkhead)).unwrap_or_default();
                let leaf = shares.leaf(holder, place(bulkhead));
                shares.add(leaf, Kind::Job, 1);
                shares.subtract(leaf, Kind::Job, jobs + 1);
                let leaf = shares.leaf(holder, place(bulkhead));
                shares.subtract(leaf, Kind::Fixed, fixed);
            }
            shares.close(holder);
        }
        assert_eq!(shares.held(), 0);
        assert_eq!(shares.free.len() + 1, shares.nodes.len(), "all nodes except the root must be free");
    }
}

fn check_giver(shares: &mut Shares, plain: &Plain, most: usize) {
    let next_eviction = shares.next_eviction(None, most);
    let users = plain.distinct(|key| Some(key.0)).max(1);
    let share = most / users;
    let is_over = |user: u32| plain.total(|key| key.0 == user) > share && plain.jobs(|key| key.0 == user) > 0;
    let may_give = plain.total(|_| true) > most && (0..4).any(is_over);
    let Some(next_eviction) = next_eviction else {
        assert!(!may_give, "some holder must free memory");
        return;
    };
    assert!(may_give);
    let Eviction::Job(leaf) = next_eviction else { panic!("only jobs can be evicted here") };
    let node = |holder: Holder| &shares.nodes[holder.0 as usize];
    let connection = node(leaf).parent;
    let user = node(connection).parent;
    let (leaf, connection, user) =
        (node(leaf).key as usize, node(connection).key % 100, node(user).key as u32);
    let of_user = plain.total(|key| key.0 == user);
    let heaviest = (0..4).filter(|&it| is_over(it)).map(|it| plain.total(|key| key.0 == it)).max();
    assert_eq!(Some(of_user), heaviest, "the user that exceeds its share by the most must free memory");
    let of_connection = |it: u64| plain.total(|key| (key.0, key.1) == (user, it));
    let gives = |it: &u64| plain.jobs(|key| (key.0, key.1) == (user, *it)) > 0;
    assert_eq!(Some(of_connection(connection)), (0..4).filter(gives).map(of_connection).max());
    let of_leaf = |it: usize| plain.total(|key| *key == (user, connection, it));
    let gives = |it: &usize| plain.jobs(|key| *key == (user, connection, *it)) > 0;
    assert_eq!(Some(of_leaf(leaf)), (0..3).filter(gives).map(of_leaf).max());
}

/// Requests `wanted` bytes for a holder in the same way as the data plane. Checks the share, counts the bytes,
/// and frees other holders' memory if necessary.
fn take(shares: &mut Shares, leaf: (Holder, usize), wanted: usize, most: usize) -> bool {
    if !shares.can_hold_share(leaf.0, Some(place(leaf.1)), wanted, most) {
        return false;
    }
    let holder = shares.leaf(leaf.0, place(leaf.1));
    shares.add(holder, Kind::Job, wanted);
    while let Some(next_eviction) = shares.next_eviction(Some((leaf.0, Some(place(leaf.1)))), most) {
        let Eviction::Job(holder) = next_eviction else { panic!("only jobs can be evicted here") };
        shares.subtract(holder, Kind::Job, wanted);
    }
    shares.held() <= most
}

#[test]
fn new_user_gets_equal_share_when_memory_is_full() {
    let most = 1200;
    let mut shares = Shares::default();
    let crowd: Vec<Holder> = (0..6).map(|n| shares.open(Owner::User(1), n)).collect();
    let mut turns = crowd.iter().cycle();
    while turns.next().is_some_and(|&connection| take(&mut shares, (connection, 0), 10, most)) {}
    assert_eq!(shares.held(), most, "a single user can use all the memory");
    // Another user can get half of the memory, but not more, no matter how many connections it opens.
    let other = shares.open(Owner::User(2), 100);
    let mut got = 0;
    while take(&mut shares, (other, 0), 10, most) {
        got += 10;
    }
    assert_eq!((got, shares.held()), (most / 2, most));
    // Another connection of the first user gets an equal share of that user's memory.
    let seventh = shares.open(Owner::User(1), 7);
    let mut got = 0;
    while take(&mut shares, (seventh, 0), 10, most) {
        got += 10;
    }
    assert_eq!((got, shares.held()), (most / 2 / 7 / 10 * 10, most));
    // Another bulkhead on the same connection also gets an equal share.
    let mut got = 0;
    while take(&mut shares, (other, 1), 10, most) {
        got += 10;
    }
    assert_eq!((got, shares.held()), (most / 4, most));
}

#[test]
fn frames_are_evicted_before_jobs() {
    let mut shares = Shares::default();
    let (a, b) = (shares.open(Owner::User(1), 1), shares.open(Owner::User(1), 2));
    let workers = shares.open(Owner::Workers, 0);
    let leaf = shares.leaf(a, place(0));
    shares.add(leaf, Kind::Job, 500);
    shares.add(b, Kind::Frame, 20);
    shares.add(workers, Kind::Fixed, 600);
    assert_eq!(
        shares.next_eviction(None, 1000),
        Some(Eviction::Frame(b)),
        "a frame must be evicted before jobs, even if it is small"
    );
    shares.subtract(b, Kind::Frame, 20);
    assert_eq!(
        shares.next_eviction(None, 1000),
        None,
        "the holder is within its share, regardless of memory held by frames to workers"
    );
    assert!(!shares.can_hold_share(a, Some(place(0)), 1, 1000));
    shares.add(leaf, Kind::Job, 1);
    assert_eq!(shares.next_eviction(None, 1000), Some(Eviction::Job(leaf)));
    shares.subtract(leaf, Kind::Job, 1);
    shares.add(leaf, Kind::Fixed, 1000);
    shares.subtract(leaf, Kind::Job, 500);
    assert_eq!(shares.next_eviction(None, 1000), None, "no holder has memory that can be freed");
    shares.close(a);
    shares.subtract(leaf, Kind::Fixed, 1000);
    assert_eq!(shares.free.len(), 2, "a closed connection must remain as long as it holds memory");
}
