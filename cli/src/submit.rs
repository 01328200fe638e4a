//! Implements `bulkhead submit`, which submits one job or `--repeat` copies of it, prints the results, and cancels the
//! jobs on ^C. `payload` reads the payload, and `load` builds the jobs and counts outcomes. To put load on a bulkhead
//! for a given time, `bench` is used instead.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, JobError, Reply};
use bulkhead_linux::output_file;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;

use crate::args::{Args, Submit};
use crate::load::{self, JobStats};
use crate::output::{self, Failure, exit};
use crate::payload;

/// Maximum time to wait for the outcomes of jobs that were cancelled by ^C.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs the command. Returns the exit code of the first job whose outcome was not `ok`, or 0 if all outcomes were `ok`.
pub(crate) async fn run(args: &Args, submit: &Submit) -> Result<u8, Failure> {
    let (payload, client) = match prepare(args, submit).await {
        Ok(prepared) => prepared,
        Err(failure) => {
            if args.json {
                // Ignores write errors, because the message is also written to standard error.
                let _ = output::json(failure.job_json(&submit.request.name));
            }
            return Err(failure);
        }
    };
    let run = SubmitRun::new(args, submit);
    let start = Instant::now();
    let mut loops = pin!(run.loops(&client, &payload));
    let result = tokio::select! {
        // The signal is polled first, so that ^C cancels every job that was sent.
        biased;
        _ = tokio::signal::ctrl_c() => None,
        result = &mut loops => Some(result),
    };
    let Some(result) = result else {
        run.interrupted.send_replace(true);
        // A second ^C skips the wait.
        tokio::select! {
            _ = tokio::time::timeout(CANCEL_TIMEOUT, loops) => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        run.bar.finish_and_clear();
        run.print_cancelled().map_err(|failure| failure.or_code(exit::CANCELLED))?;
        return Err(Failure::new(exit::CANCELLED, "cancelled"));
    };
    result?;
    run.bar.finish_and_clear();
    if submit.repeat.is_some() && !args.json {
        summarise(&run.stats.borrow(), start.elapsed());
    }
    Ok(run.first_failure.get().map_or(exit::OK, |(_, code)| code))
}

async fn prepare(args: &Args, submit: &Submit) -> Result<(Vec<u8>, Client), Failure> {
    if let Some(path) = submit.output.as_deref().filter(|path| *path != Path::new("-")) {
        check_output(path)?;
    }
    let payload = payload::for_submit(submit)?;
    Ok((payload, Client::connect(args.jobs_socket()?).await?))
}

/// State shared by all concurrent submit loops.
struct SubmitRun<'a> {
    args: &'a Args,
    submit: &'a Submit,
    count: u64,
    /// Index of the next job to submit.
    next: Cell<u64>,
    stats: RefCell<JobStats>,
    /// Index and exit code of the first job whose outcome was not `ok`.
    first_failure: Cell<Option<(u64, u8)>>,
    bar: ProgressBar,
    interrupted: watch::Sender<bool>,
}

impl<'a> SubmitRun<'a> {
    fn new(args: &'a Args, submit: &'a Submit) -> Self {
        let count = submit.repeat.unwrap_or(1);
        let has_terminal = submit.repeat.is_some() && output::has_terminal() && !args.json;
        let bar = if has_terminal { ProgressBar::new(count) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {per_sec} {eta}") {
            bar.set_style(style);
        }
        let (next, first_failure) = (Cell::new(0), Cell::new(None));
        let interrupted = watch::Sender::new(false);
        Self { args, submit, count, next, stats: RefCell::default(), first_failure, bar, interrupted }
    }

    async fn loops(&self, client: &Client, payload: &[u8]) -> Result<(), Failure> {
        let loops = u64::from(self.submit.concurrency).min(self.count);
        join_all((0..loops).map(|_| self.submit_loop(client, payload))).await
    }

    /// Submits jobs one after another until none are left.
    async fn submit_loop(&self, client: &Client, payload: &[u8]) -> Result<(), Failure> {
        while self.next.get() < self.count && !*self.interrupted.borrow() {
            let index = self.next.replace(self.next.get() + 1);
            let start = Instant::now();
            let result = self.outcome(load::job(client, &self.submit.request, payload.to_vec())).await;
            let took = start.elapsed();
            self.stats.borrow_mut().add(&result, took);
            self.bar.inc(1);
            let code = result.as_ref().map_or_else(JobError::exit_code, |_| exit::OK);
            if code != exit::OK && self.first_failure.get().is_none_or(|(first, _)| index < first) {
                self.first_failure.set(Some((index, code)));
            }
            self.print(&result).map_err(|failure| self.output_failure(failure))?;
        }
        Ok(())
    }

    /// Describes a failure to write a result, which is then lost. Also reports how many jobs are not submitted because
    /// of the failure.
    fn output_failure(&self, failure: Failure) -> Failure {
        let failure = failure.or_lost_output();
        match self.count - self.next.get() {
            0 => failure,
            count => failure.with_note(&format!("jobs not submitted: {count}")),
        }
    }

    /// Starts a job and waits for the outcome. On ^C, cancels the job and waits for the supervisor to report whether
    /// the job ran.
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
            output::to_stderr(&output::describe(result));
        }
        let payload = match result {
            Ok(reply) => reply.payload(),
            // An error payload is the output of a failed program, or data from the handler.
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

    /// Prints a line of JSON for each submitted job whose outcome the supervisor did not report.
    fn print_cancelled(&self) -> Result<(), Failure> {
        if !self.args.json {
            return Ok(());
        }
        let cancelled = output::cancelled_json(&self.submit.request.name);
        let unfinished = self.next.get() - self.stats.borrow().jobs();
        (0..unfinished).try_for_each(|_| output::json(&cancelled))
    }
}

/// Checks that the result can be written to `path`, so that the command can fail before it submits a job.
fn check_output(path: &Path) -> Result<(), Failure> {
    output_file::check(path).map_err(|error| {
        Failure::new(
            exit::OUTPUT_FAILED,
            format!("the result cannot be written to {}: {error}", path.display()),
        )
    })
}

fn save(path: &Path, payload: &[u8]) -> Result<(), Failure> {
    let fail =
        |error| Failure::new(exit::OUTPUT_FAILED, format!("failed to write {}: {error}", path.display()));
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

fn summarise(stats: &JobStats, took: Duration) {
    let seconds = took.as_secs_f64();
    let rate = stats.jobs() as f64 / seconds;
    output::to_stderr(&format!("{} jobs in {seconds:.2} s, {rate:.0} jobs/s", stats.jobs()));
    for (name, count) in &stats.outcomes {
        output::to_stderr(&format!("{count:>10}  {}", output::escape(name)));
    }
    let quantiles = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)];
    let text: Vec<String> = quantiles
        .iter()
        .filter_map(|(name, share)| Some(format!("{name} {:.3} ms", stats.quantile_ms(*share)?)))
        .collect();
    if !text.is_empty() {
        output::to_stderr(&format!("latency of successful jobs: {}", text.join(", ")));
    }
}
