//! What `/readyz` tells, which anybody may ask as often as they like: the state of each bulkhead as it was a moment
//! ago. However many ask, the data plane is asked ten times a second at most, and once more for each thing that an
//! operator had it do.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bulkhead_api::ShortState;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::ask;
use bulkhead_plane::command::{Command, Commander};
use bulkhead_plane::counters::SharedCounters;

/// For how long what was seen is good enough.
const FRESH: Duration = Duration::from_millis(100);

type States = Arc<[ShortState]>;

/// What was seen last. Those who ask while somebody looks wait for what that one sees.
#[derive(Default)]
pub(super) struct Readiness {
    seen: Mutex<Option<Seen>>,
}

struct Seen {
    at: Instant,
    revision: u64,
    states: Option<States>,
}

impl Readiness {
    /// `None` if the data plane does not answer in time.
    pub(super) async fn states(&self, commander: &Commander, pulse: &SharedCounters) -> Option<States> {
        let mut seen = self.seen.lock().await;
        let revision = pulse.revision.load(Ordering::SeqCst);
        if let Some(seen) = &*seen
            && seen.revision == revision
            && seen.at.elapsed() < FRESH
        {
            return seen.states.clone();
        }
        let states = look(commander).await;
        *seen = Some(Seen { at: Instant::now(), revision, states: states.clone() });
        states
    }
}

async fn look(commander: &Commander) -> Option<States> {
    ask(commander, |reply| Command::States { reply }).await.map(States::from)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use bulkhead_policy::BulkheadState;

    use super::*;

    #[test]
    fn those_who_ask_at_once_ask_the_data_plane_once() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let (sender, commands) = sync_channel(8);
        let commander = Commander::new(sender, waker);
        let answered = std::thread::spawn(move || {
            let mut asked = 0;
            while let Ok(Command::States { reply }) = commands.recv() {
                asked += 1;
                let one = ShortState { state: BulkheadState::Ready.into(), ..ShortState::default() };
                reply.send(vec![one]).unwrap();
            }
            asked
        });
        let began = std::time::Instant::now();
        runtime.block_on(async {
            let (readiness, pulse) = (Readiness::default(), SharedCounters::default());
            for _ in 0..1000 {
                assert_eq!(readiness.states(&commander, &pulse).await.unwrap().len(), 1);
            }
        });
        drop(commander);
        let most = 1 + began.elapsed().as_millis() / FRESH.as_millis();
        let asked: u128 = answered.join().unwrap();
        assert!((1..=most).contains(&asked), "{asked} of {most}");
    }
}
