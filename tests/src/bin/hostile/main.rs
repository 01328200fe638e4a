//! A worker that attempts forbidden actions. Each job runs one attempt and returns its result. The operation
//! names the attempt, and the payload is a JSON object with the targets ([`Targets`]).
//!
//! - `hostile`: an SDK worker. With `prepare`, runs attempts during startup that a sealed worker could not run later.
//! - `hostile once [ATTEMPT]`: an ordinary program for `exec`. Reads the targets from standard input.
//! - `hostile template HOW`: a template that violates the protocol.
//! - `hostile list`: prints the names of the attempts.
//! - `hostile whoami`: prints its effective user, for attempts that run a set-user-id program.
//!
//! **The program must be safe to run without any confinement, as root.** An attempt ends once the kernel has permitted
//! or refused the action. Attempts make calls that have no effect, pass arguments that cannot work, or set values that
//! are already set. Every attempt removes the files that it created, and every loop is bounded.

mod calls;
mod devices;
mod files;
mod identity;
mod kernel;
mod link;
mod namespaces;
mod network;
mod processes;
mod resources;
mod template;

use std::collections::BTreeSet;
use std::io::Read;
use std::process::ExitCode;
use std::sync::OnceLock;

use bulkhead_worker::{Ctx, HandlerError, Job, Server};
use calls::{Refused, Tried};
use serde_json::{Value, json};

/// Targets of the attempts, such as paths, PIDs and addresses, by name.
struct Targets(Value);

impl Targets {
    fn parse(payload: &[u8]) -> Self {
        Self(serde_json::from_slice(payload).unwrap_or_default())
    }

    fn text(&self, name: &str) -> Result<&str, Refused> {
        // If there are several paths, selects one outside this process's temporary folder.
        let own = std::env::temp_dir();
        let mut several = self.0[name].as_array().into_iter().flatten().filter_map(Value::as_str);
        let first = several.clone().next();
        let other = several.find(|path| !path.starts_with(&*own.to_string_lossy()));
        if let Some(other) = other.or(first) {
            return Ok(other);
        }
        self.0[name]
            .as_str()
            .ok_or_else(|| Refused::because("NOTARGET", format!("there is no target {name}")))
    }

    fn pid(&self, name: &str) -> Result<i32, Refused> {
        // If there are several PIDs, selects one other than this process's PID.
        let own = i64::from(std::process::id());
        let several = self.0[name].as_array().into_iter().flatten();
        if let Some(other) = several.filter_map(Value::as_i64).find(|pid| *pid != own) {
            return Ok(other as i32);
        }
        let number = self.0[name].as_i64().and_then(|pid| i32::try_from(pid).ok());
        number.ok_or_else(|| Refused::because("NOTARGET", format!("there is no target {name}")))
    }
}

type Attempt = fn(&Targets) -> Tried;

/// Returns all attempts, in the order of the modules.
fn attempts() -> impl Iterator<Item = (&'static str, Attempt)> {
    [
        files::ATTEMPTS,
        devices::ATTEMPTS,
        network::ATTEMPTS,
        processes::ATTEMPTS,
        identity::ATTEMPTS,
        namespaces::ATTEMPTS,
        kernel::ATTEMPTS,
        resources::ATTEMPTS,
        link::ATTEMPTS,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// Descriptors that this program has inherited.
static INHERITED: OnceLock<BTreeSet<i32>> = OnceLock::new();

fn main() -> ExitCode {
    INHERITED.get_or_init(files::open_descriptors);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => Server::new().handler(|job: &Job, ctx: &Ctx| tell(ctx.operation(), job.payload())).serve(),
        ["prepare"] => prepared().serve(),
        ["once", ref rest @ ..] => once(rest),
        ["list"] => {
            attempts().for_each(|(name, _)| println!("{name}"));
            ExitCode::SUCCESS
        }
        ["whoami"] => {
            println!("{}", nix::unistd::geteuid());
            ExitCode::SUCCESS
        }
        ["template", how] => template::run(how),
        ["sleep"] => resources::sleep_bounded(),
        _ => ExitCode::from(2),
    }
}

/// Runs the attempts that are impossible once a worker is sealed. The attempts run during startup, and the `prepared`
/// operation returns the results.
fn prepared() -> Server<Vec<u8>> {
    let init = |_: &bulkhead_worker::StartCtx| -> Result<Vec<u8>, HandlerError> {
        let early = ["run-a-program", "pair-of-sockets"];
        let told: Result<Vec<Value>, HandlerError> =
            early.into_iter().map(|name| attempt(name, b"{}")).collect();
        Ok(Value::from(told?).to_string().into_bytes())
    };
    Server::new().init(init).handler(|job: &Job, ctx: &Ctx<Vec<u8>>| match ctx.operation() {
        "prepared" => Ok(ctx.state().clone()),
        other => tell(other, job.payload()),
    })
}

fn once(arguments: &[&str]) -> ExitCode {
    let named = arguments.first().map(|name| (*name).to_owned());
    let operation = named.or_else(|| std::env::var("BULKHEAD_OPERATION").ok()).unwrap_or_default();
    let mut payload = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut payload);
    match tell(&operation, &payload) {
        Ok(told) => {
            println!("{}", String::from_utf8_lossy(&told));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}", error.message);
            ExitCode::FAILURE
        }
    }
}

fn tell(operation: &str, payload: &[u8]) -> Result<Vec<u8>, HandlerError> {
    match operation {
        "" => Ok(payload.to_vec()),
        "pid" => Ok(std::process::id().to_string().into_bytes()),
        "crash" => std::process::abort(),
        "hang" => loop {
            std::thread::park();
        },
        "environment" => {
            let all: serde_json::Map<_, _> = std::env::vars().map(|(k, v)| (k, v.into())).collect();
            Ok(Value::from(all).to_string().into_bytes())
        }
        "leave-a-runner" => resources::leave_a_runner(),
        // Leaves a file in the temporary folder, and returns its path.
        "leave-a-file" => {
            let path = std::env::temp_dir().join("left");
            std::fs::write(&path, "left")?;
            // Takes long enough for two concurrent jobs to run in different processes.
            let text = String::from_utf8_lossy(payload);
            std::thread::sleep(std::time::Duration::from_millis(text.parse().unwrap_or(0)));
            Ok(path.to_string_lossy().into_owned().into_bytes())
        }
        "status" => Ok(std::fs::read("/proc/self/status")?),
        "limits" => Ok(std::fs::read("/proc/self/limits")?),
        "namespaces" => Ok(namespaces::own().to_string().into_bytes()),
        name => attempt(name, payload).map(|told| told.to_string().into_bytes()),
    }
}

fn attempt(name: &str, payload: &[u8]) -> Result<Value, HandlerError> {
    let (_, attempt) = attempts()
        .find(|(known, _)| *known == name)
        .ok_or_else(|| HandlerError::new("unknown_attempt", name).caller())?;
    Ok(match attempt(&Targets::parse(payload)) {
        Ok(what) => json!({ "attempt": name, "succeeded": true, "what": what }),
        Err(Refused { errno, what }) => {
            json!({ "attempt": name, "succeeded": false, "errno": errno, "what": what })
        }
    })
}
