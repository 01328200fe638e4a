//! Creates missing streams and consumers for `init`, and compares existing ones with the configuration. Only new
//! subjects and a new number of lanes are applied to existing objects. All other differences are reported but not
//! changed. Agents only compare consumers.

use std::collections::BTreeMap;
use std::fmt;

use async_nats::Client;
use serde_json::{Map, Value, json};

use super::messages::{ApiError, api};
use crate::names::{
    AGENTS, DEAD, JOBS, LANES, LEDGER, bulkhead_subjects, consumer, consumer_filters, unescape,
};
use crate::settings::{Bulkhead, Settings};

/// Minimum server version for streams with only one replica.
const VERSION_MIN_SINGLE: (u64, u64, u64) = (2, 10, 23);
/// Minimum server version for streams with several replicas. In earlier versions, replicas can diverge, or use a wrong
/// sequence number after a leader election.
const VERSION_MIN_REPLICAS: (u64, u64, u64) = (2, 12, 8);
/// Error code for a stream that does not exist.
const STREAM_NOT_FOUND: u64 = 10059;
/// Error code for a consumer that does not exist.
const CONSUMER_NOT_FOUND: u64 = 10014;
/// Maximum number of pending pull requests per consumer.
const PULLS_MAX: u32 = 4096;
/// Lifetime of an agent's presence entry, in seconds. A running agent renews the entry before it expires.
const PRESENCE_SECONDS: u64 = 15;

/// Result of `init` for a single stream or consumer, or for the lanes of a bulkhead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The object was missing and was created.
    Created(String),
    /// The object exists and matches the configuration.
    Unchanged(String),
    /// The object differed from the configuration. The change was safe, so the object was updated.
    Changed(String),
    /// The object differs from the configuration and was not changed. Contains the object's name and the differences.
    Differs(String, Vec<String>),
}

/// Error returned by `init`.
#[derive(Debug)]
pub enum InitError {
    /// No bulkheads are configured.
    NoBulkhead,
    /// The server's version is too old.
    Version(String),
    /// The server refused a request.
    Server(String),
}

impl fmt::Display for InitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBulkhead => f.write_str("no bulkheads are configured: add a [bulkhead.NAME] table"),
            Self::Version(text) | Self::Server(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for InitError {}

impl InitError {
    fn of(object: &str, error: &ApiError) -> Self {
        let hint = match error.code {
            503 => "; with replicas, all servers must be running and have elected a leader: try again",
            _ => "",
        };
        Self::Server(format!("failed to prepare {object}: {}{hint}", error.description))
    }
}

fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn stream(name: &str, subjects: &[String], settings: &Settings, more: Value) -> Value {
    let mut config = json!({
        "name": name,
        "subjects": subjects,
        "storage": "file",
        "num_replicas": settings.streams.replicas,
        "max_consumers": -1,
        "max_msgs": -1,
        "max_msg_size": -1,
        "allow_rollup_hdrs": false,
        // The fleet does not use `Nats-Msg-Id`, so a short deduplication window is sufficient.
        "duplicate_window": 100_000_000,
    });
    merge(&mut config, more);
    config
}

fn merge(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

/// Returns the configuration of each stream.
fn streams(settings: &Settings) -> Vec<Value> {
    let streams = &settings.streams;
    let subjects: Vec<String> = settings.bulkhead.keys().flat_map(|name| bulkhead_subjects(name)).collect();
    let jobs = json!({
        "retention": "workqueue", "discard": "new", "discard_new_per_subject": true,
        "max_msgs_per_subject": streams.tenant_backlog, "max_bytes": streams.max_bytes, "max_age": 0,
        // Deletion is permitted, because agents delete messages with unreadable headers.
        "deny_purge": true, "deny_delete": false, "allow_direct": false,
    });
    let ledger = json!({
        "retention": "limits", "discard": "new", "max_msgs_per_subject": 1,
        "max_bytes": streams.ledger_max_bytes, "max_age": nanos(streams.ledger_keep),
        "deny_purge": true, "deny_delete": true, "allow_direct": true,
    });
    let dead = json!({
        "retention": "limits", "discard": "old", "max_msgs_per_subject": 1,
        "max_bytes": streams.dead_max_bytes, "max_age": nanos(streams.dead_keep),
        "deny_purge": true, "deny_delete": false, "allow_direct": true,
    });
    let agents = json!({
        "retention": "limits", "discard": "new", "max_msgs_per_subject": 1, "max_bytes": 16 << 20,
        "max_age": PRESENCE_SECONDS * 1_000_000_000, "deny_delete": true, "deny_purge": false,
        "allow_rollup_hdrs": true, "allow_direct": true,
    });
    vec![
        stream(JOBS, &subjects, settings, jobs),
        stream(LEDGER, &["bh.ledger.*.*".into()], settings, ledger),
        stream(DEAD, &["bh.dead.*.*.*".into()], settings, dead),
        stream(&format!("KV_{AGENTS}"), &[format!("$KV.{AGENTS}.>")], settings, agents),
    ]
}

/// Returns the configuration of one consumer.
fn consumer_config(settings: &Settings, bulkhead: &str, of: &Bulkhead, index: u8) -> Value {
    let mut filters = consumer_filters(bulkhead, of.lanes, index);
    let mut config = json!({
        "durable_name": consumer(bulkhead, index),
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": nanos(settings.streams.ack_wait()),
        "max_deliver": -1,
        // Unlimited, because messages that are waiting for a delayed redelivery would count towards a limit.
        "max_ack_pending": -1,
        "max_waiting": PULLS_MAX,
    });
    let filter = match filters.len() {
        1 => json!({"filter_subject": filters.remove(0)}),
        _ => json!({"filter_subjects": filters}),
    };
    merge(&mut config, filter);
    config
}

/// Compares the consumers of all bulkheads with the configuration. Returns a message for each consumer that does not
/// match, by the consumer's name. Compares only what agents rely on: the subjects that the consumer delivers, and the
/// time without a heartbeat after which the server redelivers a message.
pub(crate) async fn mismatches(
    client: &Client,
    settings: &Settings,
) -> Result<BTreeMap<String, String>, ApiError> {
    let mut found = BTreeMap::new();
    for (name, bulkhead) in &settings.bulkhead {
        for index in 0..bulkhead.lanes {
            let consumer = consumer(name, index);
            let wanted = consumer_config(settings, name, bulkhead, index);
            let info: Result<Value, ApiError> =
                api(client, &format!("CONSUMER.INFO.{JOBS}.{consumer}"), Value::Null).await;
            let problem = match info {
                Ok(info) => mismatch(&info["config"], &wanted),
                Err(error) if error.err_code == CONSUMER_NOT_FOUND => {
                    Some("does not exist; run: bulkhead fleet init".to_owned())
                }
                Err(error) => return Err(error),
            };
            found.extend(problem.map(|problem| {
                let message = format!("[bulkhead.{name}] the consumer {JOBS}/{consumer} {problem}");
                (consumer, message)
            }));
        }
    }
    Ok(found)
}

/// Describes how an existing consumer differs from the configuration, and how to correct the difference.
fn mismatch(existing: &Value, wanted: &Value) -> Option<String> {
    let differences = |keys: &[&str]| {
        let wanted = keys.iter().filter_map(|key| Some(((*key).to_owned(), wanted.get(key)?.clone())));
        differences(existing, &Value::Object(wanted.collect()))
    };
    if !differences(&["filter_subject", "filter_subjects"]).is_empty() {
        return Some(
            "was created for a different number of lanes: correct `lanes`, or stop the agents on all hosts, run \
             `bulkhead fleet init`, and start the agents again"
                .to_owned(),
        );
    }
    let difference = differences(&["ack_wait"]).pop()?;
    Some(format!(
        "was created for a different host_lost_after, so hosts could count as lost although they are running \
         ({difference}): set host_lost_after to twice the consumer's ack_wait, or stop the agents on all hosts, \
         change ack_wait with the nats command, and start the agents again"
    ))
}

/// Creates missing streams and consumers. Adds the subjects of new bulkheads, and replaces consumers if the number
/// of lanes has changed. Passes each finding to `report` at once, so that the work that precedes an error is known.
pub(crate) async fn prepare(
    client: &Client,
    settings: &Settings,
    mut report: impl FnMut(Finding),
) -> Result<(), InitError> {
    if settings.bulkhead.is_empty() {
        return Err(InitError::NoBulkhead);
    }
    check_version(client, settings)?;
    for config in streams(settings) {
        report(prepare_stream(client, &config).await?);
    }
    for (name, bulkhead) in &settings.bulkhead {
        prepare_consumers(client, settings, (name, bulkhead), &mut report).await?;
    }
    Ok(())
}

fn check_version(client: &Client, settings: &Settings) -> Result<(), InitError> {
    let info = client.server_info();
    let min = if settings.streams.replicas > 1 { VERSION_MIN_REPLICAS } else { VERSION_MIN_SINGLE };
    let found = parse_version(&info.version);
    if found.is_none_or(|found| found < min) {
        return Err(InitError::Version(format!(
            "{}:{} runs nats-server {}; {} need{} {}.{}.{} or later because earlier versions can lose or repeat jobs: \
             update the servers",
            info.host,
            info.port,
            info.version,
            if settings.streams.replicas > 1 { "replicas" } else { "a single server" },
            if settings.streams.replicas > 1 { "" } else { "s" },
            min.0,
            min.1,
            min.2
        )));
    }
    Ok(())
}

fn parse_version(text: &str) -> Option<(u64, u64, u64)> {
    let mut parts = text.split(['.', '-']).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

async fn prepare_stream(client: &Client, config: &Value) -> Result<Finding, InitError> {
    let name = config["name"].as_str().unwrap_or_default();
    let found: Result<Value, ApiError> = api(client, &format!("STREAM.INFO.{name}"), Value::Null).await;
    let found = match found {
        Ok(found) => found,
        Err(error) if error.err_code == STREAM_NOT_FOUND => {
            create(client, &format!("STREAM.CREATE.{name}"), config.clone(), name).await?;
            return Ok(Finding::Created(name.to_owned()));
        }
        Err(error) => return Err(InitError::of(name, &error)),
    };
    let mut existing = found["config"].clone();
    let differences = differences(&existing, config);
    if differences.is_empty() {
        return Ok(Finding::Unchanged(name.to_owned()));
    }
    let added = added_subjects(&existing, config);
    if differences.len() > 1 || added.is_empty() || !differences[0].starts_with("subjects") {
        return Ok(Finding::Differs(name.to_owned(), differences));
    }
    existing["subjects"] = config["subjects"].clone();
    create(client, &format!("STREAM.UPDATE.{name}"), existing, name).await?;
    let mut bulkheads: Vec<_> =
        added.iter().filter_map(|subject| unescape(subject.split('.').nth(2)?)).collect();
    bulkheads.dedup();
    Ok(Finding::Changed(format!("{name}: added the subjects of {}", bulkheads.join(", "))))
}

async fn create(client: &Client, call: &str, body: Value, object: &str) -> Result<(), InitError> {
    let created: Result<Value, ApiError> = api(client, call, body).await;
    created.map(drop).map_err(|error| InitError::of(object, &error))
}

/// Returns the subjects that the configuration adds to an existing stream. Returns an empty list if the configuration
/// would also remove subjects. Subjects that cover all lanes of a bulkhead, as created by earlier versions, are an
/// exception.
fn added_subjects(existing: &Value, wanted: &Value) -> Vec<String> {
    let list = |of: &Value| -> Vec<String> {
        of["subjects"].as_array().into_iter().flatten().filter_map(|s| Some(s.as_str()?.to_owned())).collect()
    };
    let (existing, wanted) = (list(existing), list(wanted));
    let is_replaced = |subject: &String| {
        let start = subject.strip_suffix("*.*");
        start.is_some_and(|start| (0..LANES).all(|lane| wanted.contains(&format!("{start}{lane}.*"))))
    };
    if !existing.iter().all(|subject| wanted.contains(subject) || is_replaced(subject)) {
        return Vec::new();
    }
    wanted.into_iter().filter(|subject| !existing.contains(subject)).collect()
}

async fn prepare_consumers(
    client: &Client,
    settings: &Settings,
    (name, bulkhead): (&str, &Bulkhead),
    report: &mut impl FnMut(Finding),
) -> Result<(), InitError> {
    if let Some(finding) = remove_other_lanes(client, name, bulkhead).await? {
        let is_blocked = matches!(finding, Finding::Differs(..));
        report(finding);
        if is_blocked {
            return Ok(());
        }
    }
    for index in 0..bulkhead.lanes {
        let config = consumer_config(settings, name, bulkhead, index);
        let object = format!("{JOBS}/{}", consumer(name, index));
        let call = format!("CONSUMER.INFO.{JOBS}.{}", consumer(name, index));
        let found: Result<Value, ApiError> = api(client, &call, Value::Null).await;
        match found {
            Ok(found) => {
                let differences = differences(&found["config"], &config);
                report(match differences.is_empty() {
                    true => Finding::Unchanged(object),
                    false => Finding::Differs(object, differences),
                });
            }
            Err(error) if error.err_code == CONSUMER_NOT_FOUND => {
                let body = json!({"stream_name": JOBS, "config": config, "action": "create"});
                let call = format!("CONSUMER.DURABLE.CREATE.{JOBS}.{}", consumer(name, index));
                create(client, &call, body, &object).await?;
                report(Finding::Created(object));
            }
            Err(error) => return Err(InitError::of(&object, &error)),
        }
    }
    Ok(())
}

/// Removes consumers that were created for a different number of lanes, because their filters would overlap with those
/// of the new consumers. Removes none if jobs are waiting for these consumers, because delivery counts are lost with the
/// consumers. Returns the change or the difference, and `None` if no consumer is outdated. If `init` is interrupted, the
/// next `init` removes the remaining consumers.
async fn remove_other_lanes(
    client: &Client,
    name: &str,
    bulkhead: &Bulkhead,
) -> Result<Option<Finding>, InitError> {
    let is_outdated = |(index, filters): &(u8, Vec<String>)| {
        *index >= bulkhead.lanes || !is_same_set(filters, &consumer_filters(name, bulkhead.lanes, *index))
    };
    let outdated: Vec<_> = consumers_of(client, name).await?.into_iter().filter(is_outdated).collect();
    let mut waiting = 0;
    for filter in outdated.iter().flat_map(|(_, filters)| filters) {
        waiting += count_waiting(client, filter).await?;
    }
    if waiting > 0 {
        let difference = format!(
            "lanes cannot change to {} while {waiting} jobs are waiting; stop submitting jobs, wait until `bulkhead \
             fleet status` shows no pending jobs, and try again",
            bulkhead.lanes
        );
        return Ok(Some(Finding::Differs(format!("[bulkhead.{name}]"), vec![difference])));
    }
    for (index, _) in &outdated {
        let consumer = consumer(name, *index);
        create(client, &format!("CONSUMER.DELETE.{JOBS}.{consumer}"), Value::Null, &consumer).await?;
    }
    Ok((!outdated.is_empty()).then(|| {
        Finding::Changed(format!(
            "{JOBS}: removed the consumers of {name}, which were created for a different number of lanes"
        ))
    }))
}

fn is_same_set(a: &[String], b: &[String]) -> bool {
    a.len() == b.len() && a.iter().all(|item| b.contains(item))
}

/// Returns the index and the subject filters of each consumer of a bulkhead.
async fn consumers_of(client: &Client, bulkhead: &str) -> Result<Vec<(u8, Vec<String>)>, InitError> {
    let mut found = Vec::new();
    for index in 0..LANES {
        let call = format!("CONSUMER.INFO.{JOBS}.{}", consumer(bulkhead, index));
        let info: Result<Value, ApiError> = api(client, &call, Value::Null).await;
        match info {
            Ok(info) => found.push((index, filters(&info["config"]))),
            Err(error) if error.err_code == CONSUMER_NOT_FOUND => {}
            Err(error) => return Err(InitError::of(bulkhead, &error)),
        }
    }
    Ok(found)
}

fn filters(config: &Value) -> Vec<String> {
    let several = config["filter_subjects"].as_array().into_iter().flatten();
    let all = several.chain(config.get("filter_subject"));
    all.filter_map(|filter| Some(filter.as_str()?.to_owned())).collect()
}

/// Returns the number of jobs that match the filter and have no outcome yet.
async fn count_waiting(client: &Client, filter: &str) -> Result<u64, InitError> {
    let body = json!({"subjects_filter": filter});
    let info: Value = api(client, &format!("STREAM.INFO.{JOBS}"), body)
        .await
        .map_err(|error| InitError::of(JOBS, &error))?;
    let subjects = info["state"]["subjects"].as_object().map(Map::values);
    Ok(subjects.into_iter().flatten().filter_map(Value::as_u64).sum())
}

/// Describes each key that has different values in the configuration and in the existing object. A key that the server
/// omits is treated as having its default value.
fn differences(existing: &Value, wanted: &Value) -> Vec<String> {
    let is_default = |value: &Value| matches!(value, Value::Bool(false)) || value == &json!(0);
    let mut differences = Vec::new();
    for (key, wanted) in wanted.as_object().into_iter().flatten() {
        let existing = existing.get(key).unwrap_or(&Value::Null);
        let is_equal = match (existing, wanted) {
            (Value::Null, wanted) => is_default(wanted),
            // The server does not permit clearing this flag, so the difference is ignored.
            (Value::Bool(true), Value::Bool(false)) if key == "deny_delete" => true,
            (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().all(|item| b.contains(item)),
            (a, b) => a == b,
        };
        if !is_equal {
            differences.push(format!("{key} is {existing}, but the configuration says {wanted}"));
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::bulkhead_filter;

    #[test]
    fn versions_are_compared_numerically() {
        assert_eq!(parse_version("2.12.8"), Some((2, 12, 8)));
        assert_eq!(parse_version("2.9.10-beta.1"), Some((2, 9, 10)));
        assert!(parse_version("2.9.10") < Some(VERSION_MIN_SINGLE));
        assert!(parse_version("2.15.1") > Some(VERSION_MIN_REPLICAS));
        assert_eq!(parse_version("dev"), None);
    }

    #[test]
    fn omitted_default_values_count_as_equal() {
        let wanted = json!({"a": false, "b": 0, "c": ["x", "y"], "d": 3});
        assert!(differences(&json!({"c": ["y", "x"], "d": 3, "e": 1}), &wanted).is_empty());
        assert_eq!(differences(&json!({"c": ["y"], "d": 4}), &wanted).len(), 2);
        assert!(differences(&json!({"deny_delete": true}), &json!({"deny_delete": false})).is_empty());
    }

    #[test]
    fn only_filters_and_ack_wait_must_match_for_an_agent() {
        let several = json!({"filter_subjects": ["a", "b"], "ack_wait": 5, "max_waiting": 4096});
        let single = json!({"filter_subject": "a", "ack_wait": 5});
        assert_eq!(mismatch(&json!({"filter_subjects": ["b", "a"], "ack_wait": 5}), &several), None);
        for (existing, wanted) in [(&several, &single), (&single, &several)] {
            assert!(mismatch(existing, wanted).unwrap().contains("number of lanes"));
        }
        let other = json!({"filter_subject": "a", "ack_wait": 2});
        assert!(mismatch(&other, &single).unwrap().contains("ack_wait is 2"));
    }

    #[test]
    fn subjects_are_never_removed_from_streams() {
        let (old, new) = (json!({"subjects": ["a"]}), json!({"subjects": ["a", "b"]}));
        assert_eq!(added_subjects(&old, &new), ["b"]);
        assert!(added_subjects(&new, &old).is_empty());
    }

    #[test]
    fn single_subject_of_a_bulkhead_is_replaced_by_its_lanes() {
        let old = json!({"subjects": [bulkhead_filter("a")]});
        let subjects = bulkhead_subjects("a");
        assert_eq!(added_subjects(&old, &json!({"subjects": subjects})), subjects);
        assert!(added_subjects(&old, &json!({"subjects": subjects[1..]})).is_empty());
        assert!(added_subjects(&old, &json!({"subjects": bulkhead_subjects("b")})).is_empty());
    }
}
