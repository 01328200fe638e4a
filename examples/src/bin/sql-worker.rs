//! A real SQL engine behind a bulkhead: SQLite runs whatever a tenant wrote. Each tenant has a database
//! of its own, in memory. Nothing here watches the query: a runaway one ends at its deadline, with the
//! process, and one that eats memory at the process's limit.

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use bulkhead_worker::{Ctx, HandlerError, Job, Server};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode};
use serde_json::{Map, Value, json};

const SHOP: &str = include_str!("../../data/shop.sql");

/// Databases that are kept; beyond that the worker starts over.
const TENANTS_MAX: usize = 64;

type Databases = Mutex<HashMap<String, Connection>>;

fn main() -> ExitCode {
    Server::new().init(|_| Ok::<_, HandlerError>(Databases::default())).handler(query).serve()
}

fn query(job: &Job, ctx: &Ctx<Databases>) -> Result<String, HandlerError> {
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
    let rows = databases.get(ctx.tenant()).map(|database| rows(database, sql));
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

/// Who is to blame: a query that SQLite does not like is its author's, the rest is ours.
fn blame(error: rusqlite::Error) -> HandlerError {
    match error.sqlite_error_code() {
        Some(ErrorCode::OutOfMemory) => HandlerError::new("out_of_memory", error.to_string()).caller(),
        Some(ErrorCode::TooBig) => HandlerError::new("too_big", error.to_string()).caller(),
        Some(ErrorCode::Unknown) => HandlerError::new("sql", error.to_string()).caller(),
        _ => HandlerError::new("sqlite", error.to_string()),
    }
}
