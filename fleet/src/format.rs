//! Encodes and decodes ledger records, and the outcomes in dead letters. The fields of a record are stored as headers,
//! and the result is stored as the body. `server/ledger.rs` reads and writes the records, `agent/runner.rs` writes
//! dead letters, and `operate.rs` reads them. Headers of submitted jobs are encoded in `job.rs`.

use async_nats::HeaderMap;
use bulkhead_api::JobOutcome;
use bulkhead_shared::limits::{MESSAGE_BYTES_MAX, truncate};
use bulkhead_shared::{
    CrashReason, Executed, Fault, HandlerFailure, JobId, Outcome, RejectReason, Verdict, Vocabulary,
};
use bytes::Bytes;
use std::time::Duration;

use crate::record::{Delivery, Ending, Phase, Record};

const PHASE: &str = "Bulkhead-Phase";
const AGENT: &str = "Bulkhead-Agent";
const NONCE: &str = "Bulkhead-Nonce";
const ATTEMPTS: &str = "Bulkhead-Attempts";
const STREAM_SEQUENCE: &str = "Bulkhead-Stream-Sequence";
const DELIVERY: &str = "Bulkhead-Delivery";
/// Name of the header that contains the outcome as a JSON object. The object has the same fields as the output of
/// `bulkhead submit --json`.
pub(crate) const OUTCOME: &str = "Bulkhead-Outcome";

/// Name of the dead-letter header that contains the sequence number of the job's ledger record.
pub(crate) const LEDGER_SEQUENCE: &str = "Bulkhead-Ledger-Sequence";

/// Name of the dead-letter header that contains the size of the job's payload in bytes. Set only if the letter was
/// stored without the payload.
pub(crate) const PAYLOAD_DROPPED: &str = "Bulkhead-Payload-Dropped";

/// Maximum length of a message in JSON, in bytes. The headers of a record or dead letter must fit into
/// [`HEADER_BYTES_RESERVED`](crate::job::HEADER_BYTES_RESERVED).
const MESSAGE_JSON_BYTES_MAX: usize = 2 * MESSAGE_BYTES_MAX;

/// Encodes a record as headers and body.
pub(crate) fn encode(record: &Record) -> (HeaderMap, Bytes) {
    let mut headers = HeaderMap::new();
    headers.insert(AGENT, record.agent.as_str());
    headers.insert(NONCE, record.nonce.as_str());
    headers.insert(ATTEMPTS, record.attempts.to_string());
    let (phase, outcome, body) = match &record.phase {
        Phase::Claimed { stream_sequence, delivery, previous } => {
            headers.insert(STREAM_SEQUENCE, stream_sequence.to_string());
            headers.insert(DELIVERY, delivery.to_string());
            ("claimed", previous.as_ref(), Bytes::new())
        }
        Phase::Returned { previous, delivery } => {
            if let Some(Delivery { stream_sequence, number }) = delivery {
                headers.insert(STREAM_SEQUENCE, stream_sequence.to_string());
                headers.insert(DELIVERY, number.to_string());
            }
            ("returned", Some(previous), Bytes::new())
        }
        Phase::Decided { ending, stream_sequence } => {
            if let Some(sequence) = stream_sequence {
                headers.insert(STREAM_SEQUENCE, sequence.to_string());
            }
            ("decided", Some(&ending.outcome), ending.payload.clone())
        }
    };
    headers.insert(PHASE, phase);
    if let Some(outcome) = outcome {
        headers.insert(OUTCOME, outcome_text(outcome));
    }
    (headers, body)
}

/// Decodes a record. Returns an error message if the record is not valid.
pub(crate) fn decode(headers: &HeaderMap, body: Bytes) -> Result<Record, String> {
    let text = |name: &str| {
        headers.get(name).map(|value| value.as_str()).ok_or_else(|| format!("the {name} header is missing"))
    };
    let number = |name: &str| text(name)?.parse::<u64>().map_err(|_| format!("{name} is not a number"));
    let outcome = || parse_outcome(text(OUTCOME)?);
    let phase = match text(PHASE)? {
        "claimed" => Phase::Claimed {
            stream_sequence: number(STREAM_SEQUENCE)?,
            delivery: number(DELIVERY)?,
            previous: if headers.get(OUTCOME).is_some() { Some(outcome()?) } else { None },
        },
        "returned" => Phase::Returned {
            previous: outcome()?,
            delivery: match headers.get(STREAM_SEQUENCE) {
                Some(_) => {
                    Some(Delivery { stream_sequence: number(STREAM_SEQUENCE)?, number: number(DELIVERY)? })
                }
                None => None,
            },
        },
        "decided" => Phase::Decided {
            ending: Ending { outcome: outcome()?, payload: body },
            stream_sequence: headers.get(STREAM_SEQUENCE).map(|_| number(STREAM_SEQUENCE)).transpose()?,
        },
        other => return Err(format!("the phase {other} is unknown: update this program")),
    };
    let attempts = u32::try_from(number(ATTEMPTS)?).map_err(|_| format!("{ATTEMPTS} is too large"))?;
    Ok(Record { nonce: text(NONCE)?.to_owned(), agent: text(AGENT)?.to_owned(), attempts, phase })
}

/// Returns true if the headers are those of a record with a final outcome, even if [`decode`] rejects the record.
pub(crate) fn is_decided(headers: &HeaderMap) -> bool {
    headers.get(PHASE).is_some_and(|phase| phase.as_str() == "decided")
}

/// Formats an outcome as one line of JSON. The text fits into the space that is reserved for headers.
pub(crate) fn outcome_text(outcome: &Outcome) -> String {
    let mut document = JobOutcome::new(outcome);
    document.message = outcome.verdict.message().map(|text| truncate_message(text).to_owned());
    if let Verdict::Crashed { status, .. } = &outcome.verdict {
        document.status = *status;
    }
    serde_json::to_string(&document).unwrap_or_default()
}

/// Truncates a message to at most [`MESSAGE_BYTES_MAX`], or further if its JSON form would exceed
/// [`MESSAGE_JSON_BYTES_MAX`]. JSON needs six bytes for most control characters.
fn truncate_message(text: &str) -> &str {
    let text = truncate(text, MESSAGE_BYTES_MAX);
    let mut bytes = 0;
    let end = text.char_indices().find(|(_, char)| {
        bytes += match char {
            '\u{0}'..='\u{1f}' => 6,
            '"' | '\\' => 2,
            _ => char.len_utf8(),
        };
        bytes > MESSAGE_JSON_BYTES_MAX
    });
    end.map_or(text, |(end, _)| &text[..end])
}

/// Parses the output of [`outcome_text`].
pub(crate) fn parse_outcome(text: &str) -> Result<Outcome, String> {
    let document: JobOutcome = serde_json::from_str(text).map_err(|error| format!("{OUTCOME}: {error}"))?;
    let verdict = verdict(&document).ok_or_else(|| format!("{OUTCOME} is unknown: {text}"))?;
    let status = match &verdict {
        Verdict::Crashed { .. } => None,
        _ => document.status,
    };
    Ok(Outcome {
        verdict,
        job: document.job.as_deref().and_then(|job| u64::from_str_radix(job, 16).ok()).map(JobId),
        bulkhead: document.bulkhead,
        attempts: document.attempts,
        queued: duration(document.queued_ms),
        ran: duration(document.ran_ms),
        worker_pid: document.worker_pid,
        retryable: document.retryable,
        retry_after: document.retry_after_ms.map(duration),
        deadline: document.deadline_ms.map(duration).unwrap_or_default(),
        run_limit: document.run_limit_ms.map(duration),
        status,
        report: document.report,
    })
}

fn verdict(document: &JobOutcome) -> Option<Verdict> {
    let message = document.message.clone().unwrap_or_default();
    let reason = document.reason.as_deref().unwrap_or_default();
    let executed = Executed::from_word(document.executed.as_str()).unwrap_or(Executed::Unknown);
    Some(match &*document.outcome {
        "ok" => Verdict::Ok,
        "failed" => Verdict::Failed(HandlerFailure {
            code: document.code.clone().unwrap_or_else(|| reason.to_owned()),
            message,
            retryable: document.retryable,
            fault: document
                .fault
                .as_ref()
                .and_then(|fault| Fault::from_word(fault.as_str()))
                .unwrap_or_default(),
        }),
        "rejected" => Verdict::Rejected { reason: RejectReason::from_word(reason)?, message },
        "deadline_exceeded" if reason == "running" => Verdict::DeadlineRunning,
        "deadline_exceeded" => Verdict::DeadlineQueued,
        "crashed" => {
            let status = document.exit_code.or(document.status);
            Verdict::Crashed { reason: CrashReason::from_word(reason)?, status, message }
        }
        "cancelled" => Verdict::Cancelled { executed },
        _ => return None,
    })
}

/// Converts milliseconds from an untrusted document to a duration.
fn duration(millis: f64) -> Duration {
    Duration::try_from_secs_f64((millis / 1e3).max(0.0)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::Terms;
    use crate::decide::delivery::host_lost;
    use crate::job::HEADER_BYTES_RESERVED;

    fn outcome(verdict: Verdict) -> Outcome {
        let terms = Terms { bulkhead: "b".into(), deadline: Duration::from_secs(60), is_idempotent: false };
        let times = (Duration::from_micros(1250), Duration::from_millis(7));
        Outcome { verdict, queued: times.0, ran: times.1, worker_pid: Some(12), ..host_lost(&terms, 2) }
    }

    fn verdicts() -> Vec<Verdict> {
        let failure = HandlerFailure {
            code: "no_disk".into(),
            message: "line one\nline \"two\" größer".into(),
            retryable: true,
            fault: Fault::Caller,
        };
        let mut all = vec![
            Verdict::Ok,
            Verdict::Failed(failure),
            Verdict::DeadlineQueued,
            Verdict::DeadlineRunning,
            Verdict::Cancelled { executed: Executed::Yes },
        ];
        all.extend(RejectReason::ALL.map(|reason| Verdict::Rejected { reason, message: "m".into() }));
        all.extend(CrashReason::ALL.map(|reason| Verdict::Crashed {
            reason,
            status: Some(11),
            message: "killed by SIGSEGV".into(),
        }));
        all
    }

    #[test]
    fn every_outcome_survives_a_ledger_round_trip() {
        for verdict in verdicts() {
            let mut outcome = outcome(verdict);
            outcome.retryable = matches!(outcome.verdict, Verdict::Failed(_));
            let ending = Ending { outcome, payload: Bytes::from_static(b"result\0") };
            // Earlier versions wrote no stream sequence number.
            for stream_sequence in [None, Some(7)] {
                let phase = Phase::Decided { ending: ending.clone(), stream_sequence };
                let record = Record { nonce: "n".into(), agent: "host-a".into(), attempts: 2, phase };
                let (headers, body) = encode(&record);
                assert_eq!(decode(&headers, body), Ok(record));
            }
        }
    }

    #[test]
    fn claims_survive_a_ledger_round_trip() {
        for previous in [None, Some(outcome(Verdict::DeadlineRunning))] {
            let phase = Phase::Claimed { stream_sequence: 7, delivery: 2, previous };
            let record = Record { nonce: "n".into(), agent: "a".into(), attempts: 1, phase };
            let (headers, body) = encode(&record);
            assert_eq!(decode(&headers, body), Ok(record));
        }
    }

    #[test]
    fn returns_survive_a_ledger_round_trip() {
        for delivery in [None, Some(Delivery { stream_sequence: 7, number: 2 })] {
            let phase = Phase::Returned { previous: outcome(Verdict::DeadlineRunning), delivery };
            let record = Record { nonce: "n".into(), agent: "a".into(), attempts: 1, phase };
            let (headers, body) = encode(&record);
            assert_eq!(decode(&headers, body), Ok(record));
        }
    }

    #[test]
    fn outcome_with_escaped_message_fits_into_the_headers() {
        for (text, kept_min) in [("\u{1}", 2000), ("\"", 8000), ("ö", 8000), ("a", 8000)] {
            let message = text.repeat(MESSAGE_BYTES_MAX);
            let verdict = Verdict::Rejected { reason: RejectReason::Invalid, message: message.clone() };
            let formatted = outcome_text(&outcome(verdict));
            assert!(formatted.len() < HEADER_BYTES_RESERVED * 3 / 4, "{}", formatted.len());
            let parsed = parse_outcome(&formatted).unwrap();
            assert_eq!(outcome_text(&parsed), formatted);
            let kept = parsed.verdict.message().unwrap();
            assert!(kept.len() > kept_min && message.starts_with(kept), "{}", kept.len());
        }
    }

    #[test]
    fn decode_rejects_messages_that_are_not_records() {
        let mut headers = HeaderMap::new();
        assert!(decode(&headers, Bytes::new()).is_err());
        for (name, value) in [(PHASE, "cancelled"), (NONCE, "n"), (AGENT, "a"), (ATTEMPTS, "1")] {
            headers.insert(name, value);
        }
        assert!(decode(&headers, Bytes::new()).unwrap_err().contains("update this program"));
        headers.insert(PHASE, "decided");
        assert!(decode(&headers, Bytes::new()).unwrap_err().contains(OUTCOME));
        headers.insert(OUTCOME, "{\"outcome\": \"vanished\"}");
        assert!(decode(&headers, Bytes::new()).unwrap_err().contains("unknown"));
    }
}
