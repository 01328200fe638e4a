//! The two chains that most measurements compare. A chain is the path of a request. The bare chain is client → relay →
//! echo, and the real chain is client → supervisor → worker. The relay takes the place of the supervisor, and the echo
//! that of the worker. The difference between the two chains is what Bulkhead costs.

use std::rc::Rc;
use std::sync::Arc;

use crate::load::{self, Round};
use crate::processes::{self, Process};
use crate::real::Chain;
use crate::{Result, bare};

/// The bare chain and the real chain. The processes of both chains are killed when this value is dropped.
pub(crate) struct Chains {
    pub(crate) bare: bare::Client,
    pub(crate) real: Rc<Chain>,
    pub(crate) relay: Process,
    _echo: Process,
}

impl Chains {
    pub(crate) async fn start() -> Result<Self> {
        let programs = processes::programs()?;
        let folder = tempfile::tempdir()?;
        let (near, far) = (folder.path().join("near"), folder.path().join("far"));
        let text = |path: &std::path::Path| path.to_str().map(str::to_owned).ok_or("the path is not UTF-8");
        let echo = Process::part(&["echo", &text(&far)?])?;
        processes::wait_for(&far)?;
        let relay = Process::role(&["relay", &text(&near)?, &text(&far)?])?;
        processes::wait_for(&near)?;
        let bare = bare::Client::connect(&near).await?;
        let real = Rc::new(Chain::start_all(&programs).await?);
        Ok(Self { bare, real, relay, _echo: echo })
    }

    pub(crate) async fn bare(&self, lanes: usize, total: usize, bytes: usize) -> Result<Round> {
        bare_calls(&self.bare, lanes, total, bytes).await
    }

    /// Measures the real chain with small payloads and results, which are sent within frames.
    pub(crate) async fn real(
        &self,
        bulkhead: &str,
        lanes: usize,
        total: usize,
        bytes: usize,
    ) -> Result<Round> {
        let (chain, payload) = (self.real.clone(), Rc::new(vec![b'x'; bytes]));
        let bulkhead: Rc<str> = bulkhead.into();
        load::run(lanes, total, move || {
            let (chain, payload, bulkhead) = (chain.clone(), payload.clone(), bulkhead.clone());
            async move { check(chain.call(&bulkhead, &payload).await?.len(), payload.len()) }
        })
        .await
    }
}

impl Chains {
    /// Measures the real chain with large payloads and results. Each payload is copied from the caller's memory, and
    /// each result is copied back.
    pub(crate) async fn copied(
        &self,
        bulkhead: &str,
        lanes: usize,
        total: usize,
        bytes: usize,
    ) -> Result<Round> {
        let (chain, payload) = (self.real.clone(), Arc::new(vec![b'x'; bytes]));
        let bulkhead: Rc<str> = bulkhead.into();
        load::run(lanes, total, move || {
            let (chain, payload, bulkhead) = (chain.clone(), payload.clone(), bulkhead.clone());
            async move { check(chain.call_copied(&bulkhead, payload).await?, bytes) }
        })
        .await
    }

    /// Measures the real chain with large payloads and results in mapped memory files, which the client does not copy.
    pub(crate) async fn mapped(
        &self,
        bulkhead: &str,
        lanes: usize,
        total: usize,
        bytes: usize,
    ) -> Result<Round> {
        let chain = self.real.clone();
        let bulkhead: Rc<str> = bulkhead.into();
        load::run(lanes, total, move || {
            let (chain, bulkhead) = (chain.clone(), bulkhead.clone());
            async move { check(chain.call_mapped(&bulkhead, bytes).await?, bytes) }
        })
        .await
    }
}

/// Sends requests through the bare chain and measures them.
pub(crate) async fn bare_calls(
    client: &bare::Client,
    lanes: usize,
    total: usize,
    bytes: usize,
) -> Result<Round> {
    let (client, payload) = (client.clone(), Rc::new(vec![b'x'; bytes]));
    load::run(lanes, total, move || {
        let (client, payload) = (client.clone(), payload.clone());
        async move { check(client.call(&payload).await?.len(), payload.len()) }
    })
    .await
}

fn check(got: usize, wanted: usize) -> Result<()> {
    if got == wanted { Ok(()) } else { Err(format!("{got} bytes came back instead of {wanted}").into()) }
}
