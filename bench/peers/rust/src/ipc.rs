//! Exchanges requests and replies with a worker process over two `ipc-channel` channels.

use std::process::{Child, Command};
use std::time::Instant;

use ipc_channel::ipc::{IpcOneShotServer, IpcReceiver, IpcSender, channel};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::{Order, Result, median, orders, rate, tell};

#[derive(Serialize, Deserialize)]
struct Message {
    number: u64,
    data: ByteBuf,
}

type Ends = (IpcSender<Message>, IpcReceiver<Message>);

pub fn work(name: &str) -> Result<()> {
    let (requests, jobs) = channel::<Message>()?;
    let (answers, replies) = channel::<Message>()?;
    IpcSender::<Ends>::connect(name.to_owned())?.send((requests, replies))?;
    while let Ok(job) = jobs.recv() {
        answers.send(job)?;
    }
    Ok(())
}

struct Worker {
    process: Child,
    ends: Ends,
}

impl Worker {
    fn start() -> Result<Self> {
        let (server, name) = IpcOneShotServer::<Ends>::new()?;
        let process = Command::new(std::env::current_exe()?).args(["ipc-channel-worker", &name]).spawn()?;
        let (_, ends) = server.accept()?;
        Ok(Self { process, ends })
    }

    fn send(&self, number: u64, bytes: usize) -> Result<()> {
        Ok(self.ends.0.send(Message { number, data: ByteBuf::from(vec![b'x'; bytes]) })?)
    }

    fn receive(&self, bytes: usize) -> Result<()> {
        let reply = self.ends.1.recv().map_err(|error| format!("{error:?}"))?;
        if reply.data.len() == bytes { Ok(()) } else { Err("too few bytes came back".into()) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn drive() -> Result<()> {
    let mut worker = Worker::start()?;
    for order in orders() {
        match order? {
            Order::Latency { bytes, total } => {
                let mut times = Vec::with_capacity(total);
                for number in 0..total {
                    let began = Instant::now();
                    worker.send(number as u64, bytes)?;
                    worker.receive(bytes)?;
                    times.push(began.elapsed());
                }
                tell("us", median(times).as_secs_f64() * 1e6)?;
            }
            Order::Rate { lanes, bytes, total } => {
                let began = Instant::now();
                for number in 0..total {
                    if number >= lanes {
                        worker.receive(bytes)?;
                    }
                    worker.send(number as u64, bytes)?;
                }
                for _ in 0..lanes {
                    worker.receive(bytes)?;
                }
                tell("rate", rate(total, began))?;
            }
            Order::Recovery { total } => {
                let mut times = Vec::new();
                for _ in 0..total {
                    let began = Instant::now();
                    worker.process.kill()?;
                    while worker.send(0, 64).and_then(|()| worker.receive(64)).is_ok() {}
                    worker = Worker::start()?;
                    worker.send(0, 64)?;
                    worker.receive(64)?;
                    times.push(began.elapsed());
                }
                tell("ms", median(times).as_secs_f64() * 1e3)?;
            }
        }
    }
    Ok(())
}
