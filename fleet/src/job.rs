//! Validates the options of a fleet job, and converts them to and from the headers of a message. The bulkhead and the
//! tenant are part of the subject instead, because the server checks permissions only for subjects. The client library
//! encodes the options, and the agent decodes them.

use std::time::Duration;

use async_nats::HeaderMap;
use bulkhead_client::Priority;
use bulkhead_shared::job::header_number;
use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX};

/// Maximum length of a job ID, in bytes.
pub const ID_BYTES_MAX: usize = 128;

/// Default deadline of a job.
pub const DEADLINE_DEFAULT: Duration = Duration::from_secs(3600);

/// Number of bytes of the maximum message size that are reserved for headers. The rest is available for the payload or
/// the result.
pub(crate) const HEADER_BYTES_RESERVED: usize = 32 * 1024;

/// Maximum length of a `traceparent`, in bytes. A `traceparent` of version 00 has 55 bytes.
const TRACEPARENT_BYTES_MAX: usize = 256;

const ID: &str = "Bulkhead-Id";
const OPERATION: &str = "Bulkhead-Operation";
const DEADLINE: &str = "Bulkhead-Deadline-Ms";
const RUN_LIMIT: &str = "Bulkhead-Run-Limit-Ms";
const PRIORITY: &str = "Bulkhead-Priority";
const COST: &str = "Bulkhead-Cost";
const IDEMPOTENT: &str = "Bulkhead-Idempotent";
const TRACEPARENT: &str = "traceparent";

/// Options of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobOptions {
    /// ID of the job, unique within its tenant. If a tenant submits several jobs with the same ID, only one of them
    /// runs.
    pub id: String,
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// Operation that the handler performs, or an empty string.
    pub operation: String,
    /// Tenant that the job belongs to, or an empty string.
    pub tenant: String,
    /// Time limit from submission to outcome.
    pub deadline: Option<Duration>,
    /// Maximum run time of each attempt.
    pub run_limit: Option<Duration>,
    /// Priority of the job in the supervisor's queue.
    pub priority: Priority,
    /// Cost of the job for rate limiting.
    pub cost: u32,
    /// True if the job can safely run twice.
    pub is_idempotent: bool,
    /// W3C `traceparent` to pass to the handler.
    pub traceparent: Option<String>,
}

impl JobOptions {
    /// Creates options with defaults.
    pub fn new(bulkhead: String, id: String) -> Self {
        Self {
            id,
            bulkhead,
            operation: String::new(),
            tenant: String::new(),
            deadline: None,
            run_limit: None,
            priority: Priority::default(),
            cost: 1,
            is_idempotent: false,
            traceparent: None,
        }
    }

    /// Validates the options. Returns a description of the first error.
    pub fn check(&self) -> Result<(), String> {
        let traceparent = self.traceparent.as_deref().unwrap_or_default();
        let lengths = [
            ("the ID", self.id.as_str(), 1, ID_BYTES_MAX),
            ("the name of the bulkhead", &self.bulkhead, 1, BULKHEAD_NAME_BYTES_MAX),
            ("the operation", &self.operation, 0, OPERATION_BYTES_MAX),
            ("the tenant", &self.tenant, 0, TENANT_BYTES_MAX),
            ("the traceparent", traceparent, 0, TRACEPARENT_BYTES_MAX),
        ];
        for (name, text, min, max) in lengths {
            if !(min..=max).contains(&text.len()) {
                return Err(format!("{name} has {} bytes; use {min} to {max}", text.len()));
            }
            if text.chars().any(char::is_control) {
                return Err(format!("{name} contains a control character; remove the character"));
            }
        }
        for (name, text) in [
            ("the ID", self.id.as_str()),
            ("the operation", &self.operation),
            ("the traceparent", traceparent),
        ] {
            // The NATS client strips leading and trailing spaces from header values, which would change the ID or
            // operation of the job.
            if text != text.trim() {
                return Err(format!("{name} begins or ends with a space; remove the space"));
            }
        }
        if self.deadline.is_some_and(|deadline| deadline < Duration::from_millis(1)) {
            return Err("the deadline is below 1 ms; use a longer deadline".into());
        }
        if self.run_limit.is_some_and(|limit| limit < Duration::from_millis(1)) {
            return Err("the run limit is below 1 ms; use a longer run limit".into());
        }
        Ok(())
    }

    /// Encodes the options as headers.
    pub fn to_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(ID, self.id.as_str());
        let millis = |limit: Duration| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).to_string();
        let optional = [
            (OPERATION, Some(self.operation.clone()).filter(|name| !name.is_empty())),
            (DEADLINE, self.deadline.map(millis)),
            (RUN_LIMIT, self.run_limit.map(millis)),
            (PRIORITY, (self.priority != Priority::default()).then(|| self.priority.name().to_owned())),
            (COST, (self.cost != 1).then(|| self.cost.to_string())),
            (IDEMPOTENT, self.is_idempotent.then(|| "true".to_owned())),
            (TRACEPARENT, self.traceparent.clone()),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                headers.insert(name, value);
            }
        }
        headers
    }

    /// Decodes the options of a job from a message. The second value is the reason why the message is invalid, or
    /// `None` if it is valid. A message without a valid ID gets a new ID, so that every message can have a record.
    pub fn parse(
        (bulkhead, tenant): (String, String),
        headers: Option<&HeaderMap>,
        sequence: u64,
    ) -> (Self, Option<String>) {
        let mut options = Self::new(bulkhead, String::new());
        options.tenant = tenant;
        let read = headers.map_or(Ok(()), |headers| options.read(headers));
        let error = read.and_then(|()| options.check()).err();
        if error.is_some() {
            // Keeps only the bulkhead, the tenant and the ID, because the job ends as invalid and the other options
            // must have no effect.
            let valid = Self { tenant: options.tenant, ..Self::new(options.bulkhead, options.id) };
            let has_id = valid.check().is_ok();
            let id = if has_id { valid.id.clone() } else { format!("message-{sequence}") };
            options = Self { id, ..valid };
        }
        (options, error)
    }

    fn read(&mut self, headers: &HeaderMap) -> Result<(), String> {
        let text = |name: &str| headers.get_last(name).map(|value| value.as_str().to_owned());
        self.id = text(ID).unwrap_or_default();
        self.operation = text(OPERATION).unwrap_or_default();
        self.traceparent = text(TRACEPARENT);
        if let Some(value) = text(IDEMPOTENT) {
            self.is_idempotent = value.parse().map_err(|_| format!("{IDEMPOTENT} must be true or false"))?;
        }
        let number = |name: &str| -> Result<Option<u64>, String> {
            let error = || format!("{name} is not a whole number");
            let parse = |value: String| header_number(&value).ok_or_else(error);
            text(name).map(parse).transpose()
        };
        self.deadline = number(DEADLINE)?.map(Duration::from_millis);
        self.run_limit = number(RUN_LIMIT)?.map(Duration::from_millis);
        if let Some(cost) = number(COST)? {
            self.cost = u32::try_from(cost).map_err(|_| format!("{COST} is too large"))?;
        }
        if let Some(priority) = text(PRIORITY) {
            self.priority = priority.parse().map_err(|_| format!("{PRIORITY} is not a priority"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(headers: &[(&str, &str)]) -> (JobOptions, Option<String>) {
        let mut map = HeaderMap::new();
        headers.iter().for_each(|&(name, value)| map.insert(name, value));
        JobOptions::parse(("b".into(), "t".into()), Some(&map), 7)
    }

    #[test]
    fn options_survive_the_round_trip() {
        let options = JobOptions {
            operation: "decode".into(),
            tenant: "t".into(),
            deadline: Some(Duration::from_millis(1500)),
            run_limit: Some(Duration::from_millis(20)),
            priority: Priority::Critical,
            cost: 3,
            is_idempotent: true,
            traceparent: Some("00-1-2-01".into()),
            ..JobOptions::new("b".into(), "id".into())
        };
        let (read, error) = JobOptions::parse(("b".into(), "t".into()), Some(&options.to_headers()), 1);
        assert_eq!((read, error), (options, None));
    }

    #[test]
    fn longest_durations_are_valid_headers() {
        let (deadline, run_limit) = (Some(Duration::MAX), Some(Duration::MAX));
        let options = JobOptions { deadline, run_limit, ..JobOptions::new("b".into(), "id".into()) };
        let (read, error) = JobOptions::parse(("b".into(), String::new()), Some(&options.to_headers()), 1);
        assert_eq!((read.deadline, error), (Some(Duration::from_millis(u64::MAX)), None));
    }

    #[test]
    fn header_with_outer_spaces_is_rejected() {
        assert!(JobOptions::new("b".into(), "id ".into()).check().is_err());
        let options = JobOptions { operation: " decode".into(), ..JobOptions::new("b".into(), "id".into()) };
        assert!(options.check().is_err());
        assert!(JobOptions { operation: "a b".into(), ..options }.check().is_ok());
    }

    #[test]
    fn message_without_id_is_given_one() {
        for headers in [&[][..], &[("Bulkhead-Id", "")], &[("Bulkhead-Id", "a\u{1}b")]] {
            let (options, error) = parsed(headers);
            assert_eq!(options.id, "message-7");
            assert!(error.is_some());
        }
    }

    #[test]
    fn message_with_invalid_header_keeps_its_id() {
        for (name, value) in [
            ("Bulkhead-Deadline-Ms", "soon"),
            ("Bulkhead-Deadline-Ms", "0"),
            ("Bulkhead-Deadline-Ms", "-1"),
            ("Bulkhead-Deadline-Ms", "+5"),
            ("Bulkhead-Cost", "+1"),
            ("Bulkhead-Cost", "4294967296"),
            ("Bulkhead-Priority", "urgent"),
            ("Bulkhead-Idempotent", "yes"),
            ("Bulkhead-Idempotent", "1"),
            ("traceparent", "a\u{1}b"),
        ] {
            let (options, error) = parsed(&[("Bulkhead-Id", "mine"), (name, value)]);
            assert_eq!(options.id, "mine", "{name}: {value}");
            assert!(error.is_some(), "{name}: {value}");
        }
    }

    #[test]
    fn no_header_is_copied_if_any_is_too_long() {
        let long = "x".repeat(60_000);
        for name in ["Bulkhead-Id", "Bulkhead-Operation", "traceparent"] {
            let (options, error) = parsed(&[("Bulkhead-Id", "mine"), (name, &long)]);
            assert!(error.is_some(), "{name}");
            assert_eq!(options.to_headers().len(), 1, "{name}");
            assert!(options.id.len() <= ID_BYTES_MAX, "{name}");
        }
    }
}
