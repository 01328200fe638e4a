//! Builds and parses the names of subjects, streams and consumers. Also escapes names and assigns tenants to lanes. All
//! functions are pure. `server/streams.rs` creates the streams and consumers with these names.

use sha2::{Digest, Sha256};

/// Name of the stream for jobs that have no outcome yet.
pub const JOBS: &str = "BH_JOBS";
/// Name of the stream for the ledger, which contains one record per job.
pub const LEDGER: &str = "BH_LEDGER";
/// Name of the stream for dead letters, which are jobs that ended neither as `ok` nor as `cancelled`.
pub const DEAD: &str = "BH_DEAD";
/// Name of the key-value bucket in which the agents announce their presence.
pub const AGENTS: &str = "bh_agents";

/// Number of lanes to which the tenants of a bulkhead are assigned. Each consumer serves one or more lanes.
pub const LANES: u8 = 16;
/// Priority class in the subject of a job. There is only one class so far.
const CLASS: &str = "n";

/// Escapes a name for use as one token of a subject. Each byte other than `A-Za-z0-9_-` becomes `=XX`. An empty
/// name becomes `=`.
pub fn escape(name: &str) -> String {
    if name.is_empty() {
        return "=".to_owned();
    }
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => out.push(char::from(byte)),
            _ => out.push_str(&format!("={byte:02X}")),
        }
    }
    out
}

/// Reverses [`escape`]. Returns `None` if the text is not an escaped name.
pub fn unescape(token: &str) -> Option<String> {
    if token == "=" {
        return Some(String::new());
    }
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first != b'=' {
            bytes.push(first);
            rest = after;
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok().filter(|name| !name.is_empty() && escape(name) == token)
}

/// Returns the index of a tenant's lane. All of the tenant's jobs share this lane.
pub fn lane(tenant: &str) -> u8 {
    Sha256::digest(tenant.as_bytes())[0] % LANES
}

/// Returns the subject for jobs that a tenant submits to a bulkhead.
pub fn job_subject(bulkhead: &str, tenant: &str) -> String {
    format!("bh.job.{}.{CLASS}.{}.{}", escape(bulkhead), lane(tenant), escape(tenant))
}

/// Returns the subject filter for all jobs of a bulkhead.
pub fn bulkhead_filter(bulkhead: &str) -> String {
    format!("bh.job.{}.{CLASS}.*.*", escape(bulkhead))
}

/// Returns the subjects of a bulkhead's jobs, one for each lane. The stream accepts no other lanes, because the maximum
/// number of waiting jobs applies to each subject. A tenant could otherwise exceed this maximum by using more subjects.
pub fn bulkhead_subjects(bulkhead: &str) -> Vec<String> {
    (0..LANES).map(|lane| lane_filter(bulkhead, lane)).collect()
}

fn lane_filter(bulkhead: &str, lane: u8) -> String {
    format!("bh.job.{}.{CLASS}.{lane}.*", escape(bulkhead))
}

/// Returns the subject filters for the consumer at `index` of a bulkhead with `lanes` consumers.
pub fn consumer_filters(bulkhead: &str, lanes: u8, index: u8) -> Vec<String> {
    if lanes == 1 {
        return vec![bulkhead_filter(bulkhead)];
    }
    let width = LANES / lanes;
    (index * width..(index + 1) * width).map(|lane| lane_filter(bulkhead, lane)).collect()
}

/// Returns the name of the bulkhead's consumer at `index`.
pub fn consumer(bulkhead: &str, index: u8) -> String {
    format!("{}_{CLASS}_{index}", escape(bulkhead))
}

/// Extracts the bulkhead and tenant from the subject of a job.
pub fn parse_job_subject(subject: &str) -> Option<(String, String)> {
    let tokens: Vec<_> = subject.split('.').collect();
    match tokens[..] {
        ["bh", "job", bulkhead, _class, _lane, tenant] => Some((unescape(bulkhead)?, unescape(tenant)?)),
        _ => None,
    }
}

/// Returns the subject of a job's record in the ledger.
pub fn ledger_subject(tenant: &str, id: &str) -> String {
    format!("bh.ledger.{}.{}", escape(tenant), escape(id))
}

/// Returns the subject of notices about a job's outcome.
pub fn notice_subject(tenant: &str, id: &str) -> String {
    format!("bh.told.{}.{}", escape(tenant), escape(id))
}

/// Returns the subject of a job's dead letter.
pub fn dead_subject(bulkhead: &str, tenant: &str, id: &str) -> String {
    format!("bh.dead.{}.{}.{}", escape(bulkhead), escape(tenant), escape(id))
}

/// Extracts the bulkhead, tenant and ID from the subject of a dead letter.
pub fn parse_dead_subject(subject: &str) -> Option<(String, String, String)> {
    let tokens: Vec<_> = subject.split('.').collect();
    match tokens[..] {
        ["bh", "dead", bulkhead, tenant, id] => Some((unescape(bulkhead)?, unescape(tenant)?, unescape(id)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_escaping() {
        for name in ["", "acme", "a.b", "=", "*", ">", "größe", "a b\n", "A-Z_9"] {
            let token = escape(name);
            assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-=".contains(&b)), "{token}");
            assert_eq!(unescape(&token).as_deref(), Some(name));
        }
    }

    #[test]
    fn unescape_rejects_foreign_tokens() {
        for token in ["", "=4", "=41", "=zz", "a.b", "=FF", "=2e"] {
            assert_eq!(unescape(token), None, "{token}");
        }
    }

    #[test]
    fn consumers_cover_each_lane_exactly_once() {
        for lanes in [2, 4, 8, 16] {
            let mut filters: Vec<_> =
                (0..lanes).flat_map(|index| consumer_filters("b", lanes, index)).collect();
            filters.sort();
            filters.dedup();
            assert_eq!(filters.len(), usize::from(LANES));
        }
        assert_eq!(consumer_filters("b", 1, 0), ["bh.job.b.n.*.*"]);
    }

    #[test]
    fn subjects_contain_bulkhead_and_tenant() {
        let subject = job_subject("a.b", "");
        assert_eq!(parse_job_subject(&subject), Some(("a.b".into(), String::new())));
        assert_eq!(parse_job_subject("bh.job.a.n.1"), None);
        let dead = dead_subject("a", "t", "7");
        assert_eq!(parse_dead_subject(&dead), Some(("a".into(), "t".into(), "7".into())));
    }

    #[test]
    fn tenant_lane_never_changes() {
        // Consumers filter by lane, so a changed assignment would break running fleets.
        assert_eq!([lane(""), lane("acme"), lane("quiet")], [3, 2, 0]);
    }

    #[test]
    fn example_tenant_can_publish_only_in_its_own_lane() {
        let config = include_str!("../../deploy/nats/server.conf");
        let subjects: Vec<_> = config.split('"').filter(|text| text.starts_with("bh.job.")).collect();
        // One export, one permission and one import.
        assert_eq!(subjects, vec![job_subject("*", "acme").replace("=2A", "*"); 3]);
    }
}
