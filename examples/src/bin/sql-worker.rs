//! A real SQL engine behind a bulkhead. SQLite runs arbitrary SQL sent by tenants. Each tenant has a separate
//! in-memory database.
//!
//! - By default, the worker does not monitor its queries. A query that does not finish is killed at its deadline,
//!   together with the worker.
//! - With the `polite` operation, the worker stops a query when no client is waiting for the rows any more, and serves
//!   the next job.
//! - A query that uses too much memory is stopped by a limit in SQLite itself.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use bulkhead_worker::{Ctx, HandlerError, Job, Server};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Map, Value, json};

const SHOP: &str = include_str!("../../data/shop.sql");

/// Maximum number of databases to keep. If this number is exceeded, the worker drops all databases.
const TENANTS_MAX: usize = 64;

/// Maximum heap size of SQLite per process, in bytes. Must be well below the `as` limit in `workers.toml`.
const HEAP_BYTES_MAX: u32 = 64 << 20;

/// Number of SQLite instructions between checks for cancellation.
const STEPS_PER_LOOK: i32 = 10_000;

type Databases = Mutex<HashMap<String, Connection>>;

fn main() -> ExitCode {
    Server::new().init(|_| prepare()).operation("polite", polite).operation("", query).serve()
}

fn prepare() -> rusqlite::Result<Databases> {
    // The limit applies to the whole process, so any connection can set it.
    Connection::open_in_memory()?.pragma_update(None, "hard_heap_limit", HEAP_BYTES_MAX)?;
    Ok(Databases::default())
}

/// Runs the query until it finishes or until no client is waiting for the rows.
fn polite(job: &Job, ctx: &Ctx<Databases>) -> Result<String, HandlerError> {
    let cancelled = ctx.cancellation()?.try_clone_to_owned()?;
    answer(job, ctx, |database| {
        database.progress_handler(STEPS_PER_LOOK, Some(move || is_readable(&cancelled)));
    })
}

/// Runs the query until it finishes.
fn query(job: &Job, ctx: &Ctx<Databases>) -> Result<String, HandlerError> {
    answer(job, ctx, |database| database.progress_handler(0, None::<fn() -> bool>))
}

fn is_readable(descriptor: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(descriptor, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1))
}

fn answer(job: &Job, ctx: &Ctx<Databases>, watch: impl FnOnce(&Connection)) -> Result<String, HandlerError> {
    let sql = std::str::from_utf8(job.payload())
        .map_err(|error| HandlerError::new("not_text", error.to_string()).caller())?;
    let mut databases = ctx.state().lock().unwrap_or_else(PoisonError::into_inner);
    if databases.len() > TENANTS_MAX {
        databases.clear();
    }
    if !databases.contains_key(ctx.tenant()) {
        let database = Connection::open_in_memory()?;
        database.execute_batch(SHOP)?;
        databases.insert(ctx.tenant().to_owned(), database);
    }
    let rows = databases.get(ctx.tenant()).map(|database| {
        watch(database);
        rows(database, sql)
    });
    rows.transpose().map(|rows| json!(rows.unwrap_or_default()).to_string()).map_err(blame)
}

fn rows(database: &Connection, sql: &str) -> rusqlite::Result<Vec<Value>> {
    let mut statement = database.prepare(sql)?;
    let names: Vec<String> = statement.column_names().into_iter().map(str::to_owned).collect();
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let mut object = Map::new();
        for (i, name) in names.iter().enumerate() {
            object.insert(name.clone(), value(row.get_ref(i)?));
        }
        found.push(Value::Object(object));
    }
    Ok(found)
}

fn value(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => json!(number),
        ValueRef::Real(number) => json!(number),
        ValueRef::Text(text) => json!(String::from_utf8_lossy(text)),
        ValueRef::Blob(bytes) => json!(format!("{} bytes", bytes.len())),
    }
}

/// Decides who is at fault for an error. Errors in the query are the caller's fault. Only internal SQLite
/// errors count against the bulkhead.
fn blame(error: rusqlite::Error) -> HandlerError {
    use ErrorCode as C;
    let message = error.to_string();
    match error.sqlite_error_code() {
        Some(C::InternalMalfunction | C::SystemIoFailure | C::DatabaseCorrupt | C::CannotOpen) => {
            HandlerError::new("sqlite", message)
        }
        Some(C::OutOfMemory) => HandlerError::new("out_of_memory", message).caller(),
        Some(C::TooBig) => HandlerError::new("too_big", message).caller(),
        Some(C::OperationInterrupted) => HandlerError::new("interrupted", message).caller(),
        _ => HandlerError::new("sql", message).caller(),
    }
}
