//! `bulkhead submit`: submits one job or many.

use std::cell::{Cell, RefCell};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, JobError, Reply};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;

use crate::args::{Args, Submit};
use crate::load::{self, Tally};
use crate::output::{self, Failure, exit};
use crate::payload;

/// Maximum time to wait for the outcomes of jobs cancelled by ^C.
const CANCELLED_WITHIN: Duration = Duration::from_secs(2);

/// Runs the command. Returns the exit code of the first job that was not `ok`, otherwise 0.
pub(crate) async fn run(args: &Args, submit: &Submit) -> Result<u8, Failure> {
    let (payload, client) = match prepare(args, submit).await {
        Ok(prepared) => prepared,
        Err(failure) => {
            if args.json {
                output::json(failure.job_json(&submit.request.name))?;
            }
            return Err(failure);
        }
    };
    let run = Run::new(args, submit);
    let began = Instant::now();
    let mut lanes = pin!(run.lanes(&client, &payload));
    let result = tokio::select! {
        // Polled first, so that ^C cancels every job that has been sent.
        biased;
        _ = tokio::signal::ctrl_c() => None,
        result = &mut lanes => Some(result),
    };
    let Some(result) = result else {
        run.interrupted.send_replace(true);
        // A second ^C skips the wait.
        tokio::select! {
            _ = tokio::time::timeout(CANCELLED_WITHIN, lanes) => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        run.bar.finish_and_clear();
        run.print_cancelled()?;
        return Err(Failure::new(exit::CANCELLED, "cancelled"));
    };
    result?;
    run.bar.finish_and_clear();
    if submit.repeat.is_some() && !args.json {
        summarise(&run.tally.borrow(), began.elapsed());
    }
    Ok(run.first_bad.get().map_or(exit::OK, |(_, code)| code))
}

async fn prepare(args: &Args, submit: &Submit) -> Result<(Vec<u8>, Client), Failure> {
    if let Some(path) = submit.output.as_deref().filter(|path| *path != Path::new("-")) {
        check_output(path)?;
    }
    let payload = payload::of_submit(submit)?;
    Ok((payload, Client::connect(args.socket()).await?))
}

/// State shared by all lanes.
struct Run<'a> {
    args: &'a Args,
    submit: &'a Submit,
    count: u64,
    /// Index of the next job.
    next: Cell<u64>,
    tally: RefCell<Tally>,
    /// Index and exit code of the first job that was not `ok`.
    first_bad: Cell<Option<(u64, u8)>>,
    bar: ProgressBar,
    interrupted: watch::Sender<bool>,
}

impl<'a> Run<'a> {
    fn new(args: &'a Args, submit: &'a Submit) -> Self {
        let count = submit.repeat.unwrap_or(1);
        let is_watched = submit.repeat.is_some() && output::is_watched() && !args.json;
        let bar = if is_watched { ProgressBar::new(count) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {per_sec} {eta}") {
            bar.set_style(style);
        }
        let (next, first_bad) = (Cell::new(0), Cell::new(None));
        let interrupted = watch::Sender::new(false);
        Self { args, submit, count, next, tally: RefCell::default(), first_bad, bar, interrupted }
    }

    async fn lanes(&self, client: &Client, payload: &[u8]) -> Result<(), Failure> {
        let lanes = u64::from(self.submit.concurrency).min(self.count);
        join_all((0..lanes).map(|_| self.lane(client, payload))).await
    }

    /// Submits one job after the other until none is left.
    async fn lane(&self, client: &Client, payload: &[u8]) -> Result<(), Failure> {
        while self.next.get() < self.count && !*self.interrupted.borrow() {
            let index = self.next.replace(self.next.get() + 1);
            let began = Instant::now();
            let result = self.outcome(load::job(client, &self.submit.request, payload.to_vec())).await;
            let took = began.elapsed();
            self.tally.borrow_mut().add(&result, took);
            self.bar.inc(1);
            let code = result.as_ref().map_or_else(JobError::exit_code, |_| exit::OK);
            if code != exit::OK && self.first_bad.get().is_none_or(|(first, _)| index < first) {
                self.first_bad.set(Some((index, code)));
            }
            let so_far = self.first_bad.get().map_or(exit::OK, |(_, code)| code);
            self.print(&result).map_err(|failure| failure.or_code(so_far))?;
        }
        Ok(())
    }

    /// Waits for the outcome of a job. After ^C, cancels the job and waits for the supervisor to report
    /// whether it ran.
    async fn outcome(&self, job: Job) -> Result<Reply, JobError> {
        let mut handle = job.start().await?;
        let mut interrupted = self.interrupted.subscribe();
        tokio::select! {
            result = &mut handle => return result,
            _ = interrupted.wait_for(|is_interrupted| *is_interrupted) => handle.cancel(),
        }
        handle.await
    }

    fn print(&self, result: &Result<Reply, JobError>) -> Result<(), Failure> {
        let json = self.args.json;
        if json {
            output::json(output::outcome_json(&self.submit.request.name, result))?;
        } else if self.submit.repeat.is_none() {
            output::note(&output::describe(result));
        }
        let payload = match result {
            Ok(reply) => reply.payload(),
            // The output of a failed program, or data from the handler.
            Err(error) if !error.payload().is_empty() => error.payload(),
            Err(_) => return Ok(()),
        };
        match &self.submit.output {
            Some(path) if path == Path::new("-") => output::raw(payload),
            Some(path) => save(path, payload),
            None if !json => output::raw(payload),
            None => Ok(()),
        }
    }

    /// Prints a line for each job that was begun, even if the supervisor did not report its outcome.
    fn print_cancelled(&self) -> Result<(), Failure> {
        if !self.args.json {
            return Ok(());
        }
        let cancelled = output::cancelled_json(&self.submit.request.name);
        let under_way = self.next.get() - self.tally.borrow().jobs();
        (0..under_way).try_for_each(|_| output::json(&cancelled))
    }
}

/// Checks before the job runs whether the result can be written. Creates nothing.
fn check_output(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if found.is_file() => OpenOptions::new().append(true).open(path).map(drop),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match std::fs::metadata(folder) {
            Ok(found) if !found.is_dir() => Err(io::ErrorKind::NotADirectory.into()),
            other => other.map(drop),
        },
        Err(error) => Err(error),
    };
    checked.map_err(|error: io::Error| {
        Failure::new(exit::USAGE, format!("the result cannot be written to {}: {error}", path.display()))
    })
}

fn save(path: &Path, payload: &[u8]) -> Result<(), Failure> {
    let fail = |error| Failure::new(exit::UNWRITTEN, format!("failed to write {}: {error}", path.display()));
    std::fs::write(path, payload).map_err(fail)
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

fn summarise(tally: &Tally, took: Duration) {
    let seconds = took.as_secs_f64();
    let rate = tally.jobs() as f64 / seconds;
    output::note(&format!("{} jobs in {seconds:.2} s, {rate:.0} jobs/s", tally.jobs()));
    for (name, count) in &tally.outcomes {
        output::note(&format!("{count:>10}  {}", output::harmless(name)));
    }
    let quantiles = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)];
    let text: Vec<String> = quantiles
        .iter()
        .filter_map(|(name, share)| Some(format!("{name} {:.3} ms", tally.quantile_ms(*share)?)))
        .collect();
    if !text.is_empty() {
        output::note(&format!("latency of ok: {}", text.join(", ")));
    }
}
