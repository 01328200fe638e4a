//! `bulkhead submit`: one job or many.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use bulkhead_client::{Client, JobError, Reply};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::{Args, Submit};
use crate::load::{self, Tally};
use crate::output::{self, Failure, exit};

/// Runs the command; returns its exit code.
pub(crate) async fn run(args: &Args, submit: &Submit) -> Result<u8, Failure> {
    let payload = load::payload(submit.request.payload_file.as_deref())?;
    let client = Client::connect(args.socket()).await?;
    let work = async {
        match submit.repeat {
            None => one(args, submit, &client, payload).await,
            Some(count) => many(args, submit, client.clone(), payload, count).await,
        }
    };
    tokio::select! {
        result = work => result,
        _ = tokio::signal::ctrl_c() => {
            // Dropping the jobs has cancelled them; their cancellation is written by now.
            Err(Failure::new(exit::CANCELLED, "cancelled"))
        }
    }
}

async fn one(args: &Args, submit: &Submit, client: &Client, payload: Vec<u8>) -> Result<u8, Failure> {
    let result = load::job(client, &submit.request, payload).send().await;
    if let (Ok(reply), Some(path)) = (&result, &submit.output) {
        save(path, reply)?;
    }
    if args.json {
        output::line(&output::outcome_json(&result).to_string());
    } else {
        if let (Ok(reply), None) = (&result, &submit.output) {
            output::raw(reply.payload());
        }
        output::note(&output::describe(&result));
    }
    Ok(exit_code(&result))
}

fn save(path: &Path, reply: &Reply) -> Result<(), Failure> {
    let fail = |error| Failure::new(exit::FAILED, format!("failed to write {}: {error}", path.display()));
    std::fs::write(path, reply.payload()).map_err(fail)
}

fn exit_code(result: &Result<Reply, JobError>) -> u8 {
    result.as_ref().map_or_else(JobError::exit_code, |_| exit::OK)
}

struct Run {
    next: Cell<u64>,
    tally: RefCell<Tally>,
    /// The first job that was not `ok`, and how it ended.
    first_bad: Cell<Option<(u64, u8)>>,
    bar: ProgressBar,
}

async fn many(
    args: &Args,
    submit: &Submit,
    client: Client,
    payload: Vec<u8>,
    count: u64,
) -> Result<u8, Failure> {
    let bar =
        if output::is_watched() && !args.json { ProgressBar::new(count) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {per_sec} {eta}") {
        bar.set_style(style);
    }
    let run = Rc::new(Run { next: Cell::new(0), tally: RefCell::default(), first_bad: Cell::new(None), bar });
    let began = Instant::now();
    let lanes = (0..u64::from(submit.concurrency).min(count))
        .map(|_| lane(args, submit, &client, &payload, count, &run));
    join_all(lanes).await?;
    run.bar.finish_and_clear();
    if !args.json {
        summarise(&mut run.tally.borrow_mut(), began.elapsed());
    }
    Ok(run.first_bad.get().map_or(exit::OK, |(_, code)| code))
}

/// Submits one job after the other as long as there are any.
async fn lane(
    args: &Args,
    submit: &Submit,
    client: &Client,
    payload: &[u8],
    count: u64,
    run: &Run,
) -> Result<(), Failure> {
    loop {
        let index = run.next.get();
        if index >= count {
            return Ok(());
        }
        run.next.set(index + 1);
        let (result, took) = load::timed(load::job(client, &submit.request, payload.to_vec())).await;
        run.tally.borrow_mut().add(&result, took);
        run.bar.inc(1);
        if let (Ok(reply), Some(path)) = (&result, &submit.output) {
            save(path, reply)?;
        }
        if args.json {
            output::line(&output::outcome_json(&result).to_string());
        }
        if result.is_err() && run.first_bad.get().is_none_or(|(first, _)| index < first) {
            run.first_bad.set(Some((index, exit_code(&result))));
        }
    }
}

async fn join_all<F: Future<Output = Result<(), Failure>>>(
    futures: impl Iterator<Item = F>,
) -> Result<(), Failure> {
    let mut running: Vec<_> = futures.map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        let mut index = 0;
        while index < running.len() {
            match running[index].as_mut().poll(cx) {
                std::task::Poll::Pending => index += 1,
                std::task::Poll::Ready(Ok(())) => drop(running.swap_remove(index)),
                std::task::Poll::Ready(Err(failure)) => return std::task::Poll::Ready(Err(failure)),
            }
        }
        if running.is_empty() { std::task::Poll::Ready(Ok(())) } else { std::task::Poll::Pending }
    })
    .await
}

fn summarise(tally: &mut Tally, took: std::time::Duration) {
    tally.sort();
    let seconds = took.as_secs_f64();
    let rate = tally.jobs() as f64 / seconds;
    output::note(&format!("{} jobs in {seconds:.2} s, {rate:.0} jobs/s", tally.jobs()));
    for (name, count) in &tally.outcomes {
        output::note(&format!("{count:>10}  {}", output::harmless(name)));
    }
    let quantiles = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)];
    let text: Vec<String> = quantiles
        .iter()
        .filter_map(|(name, share)| {
            Some(format!("{name} {:.3} ms", tally.quantile(*share)?.as_secs_f64() * 1e3))
        })
        .collect();
    if !text.is_empty() {
        output::note(&format!("latency of ok: {}", text.join(", ")));
    }
}
