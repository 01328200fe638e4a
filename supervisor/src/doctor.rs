//! Implements `bulkhead-supervisor doctor`, which reports the layers of confinement that this machine supports, and why
//! others are missing. The keeper's `probe` tests the layers. Starts no worker and reads no configuration.

use std::io::{self, Write};
use std::sync::Arc;

use bulkhead_config::defaults::WORKER_UIDS;
use bulkhead_keeper::{LayerSupport, SubordinateIds, probe};
use bulkhead_plane::worker_ids::{IdAllocator, IdUse, find_subordinate};
use comfy_table::{ContentArrangement, Table, presets};

/// Probes all layers of confinement, and writes the results as a table or as JSON.
pub fn run(json: bool, out: &mut impl Write) -> io::Result<()> {
    let mut abilities = probe();
    abilities.push(worker_ids(&abilities));
    if json {
        serde_json::to_writer_pretty(&mut *out, &abilities)?;
        return writeln!(out);
    }
    writeln!(out, "{}", table(&abilities))
}

/// Returns the row of the results that says whether workers get separate user IDs if `user` is not configured.
fn worker_ids(abilities: &[LayerSupport]) -> LayerSupport {
    let others = abilities.iter().find(|ability| ability.layer == "other users");
    let is_root = rustix::process::geteuid().is_root();
    let found = match others.and_then(|others| others.why_not.clone()) {
        None => IdAllocator::new(None, IdUse::Check)
            .map(|_| format!("separate user IDs from the range {WORKER_UIDS}")),
        Some(why) if is_root => Err(format!("workers do not start: {why}")),
        Some(_) => {
            let missing = |part: &str| {
                let ability = abilities.iter().find(|one| one.layer == part && !one.is_available);
                ability.map(|one| format!("{part}: {}", one.why_not.as_deref().unwrap_or_default()))
            };
            match find_subordinate(missing, || SubordinateIds::find().map(Arc::new), None, IdUse::Check) {
                Ok((ids, _)) => {
                    Ok(format!("separate user IDs from the range {}-{} (/etc/subuid)", ids.first, ids.last))
                }
                Err(why) => Err(format!("workers run as the supervisor's own user: {why}")),
            }
        }
    };
    let what_to_do = if is_root {
        "grant root the missing ability, map the user IDs, or write `user = \"root\"` in `sandbox`"
    } else {
        "add IDs to /etc/subuid and /etc/subgid (`usermod --add-subuids`) and install the uidmap package, or run the \
         supervisor as root"
    };
    LayerSupport::of("worker ids", found.map(Some), what_to_do)
}

fn table(abilities: &[LayerSupport]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["LAYER", "AVAILABLE", "FOUND OR REASON", "WHAT TO DO"]);
    for ability in abilities {
        let available = if ability.is_available { "yes" } else { "no" };
        let found = ability.found.as_deref().or(ability.why_not.as_deref()).unwrap_or("-");
        table.add_row([&ability.layer, available, found, ability.what_to_do.as_deref().unwrap_or("-")]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_table_has_a_row_per_layer() {
        let missing = LayerSupport::of("pidfd", Err("Function not implemented".into()), "run a newer kernel");
        let there = LayerSupport::of("seccomp", Ok(None), "");
        let table = table(&[missing, there]).to_string();
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        assert_eq!(lines[0], ["LAYER", "AVAILABLE", "FOUND OR REASON", "WHAT TO DO"]);
        assert_eq!(lines[1], ["pidfd", "no", "Function not implemented", "run a newer kernel"]);
        assert_eq!(lines[2], ["seccomp", "yes", "-", "-"]);
    }

    #[test]
    fn doctor_json_output_is_an_array() {
        let mut out = Vec::new();
        run(true, &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert!(value[0]["available"].is_boolean() && value[0]["layer"] == "landlock");
    }
}
