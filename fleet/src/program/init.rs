//! Implements `bulkhead-fleet init`, which creates the fleet's missing streams and consumers and prints differences
//! from the configuration. `operate` sends the requests and compares the objects.

use bulkhead_fleet::operate::Operator;
use bulkhead_fleet::settings::Settings;
use bulkhead_fleet::{Finding, InitError};
use serde_json::json;

use super::output::{self, Failure, exit};

/// Runs the command.
pub(crate) async fn run(settings: &Settings, is_json: bool) -> Result<u8, Failure> {
    let operator = Operator::connect(settings).await.map_err(Failure::unreachable)?;
    let (mut differs, mut printed) = (false, Ok(()));
    let prepared = operator.init(|finding| {
        differs |= matches!(finding, Finding::Differs(..));
        if printed.is_ok() {
            // The exit code still reports differences.
            printed = print(&finding, is_json).or_else(Failure::unless_closed_pipe);
        }
    });
    prepared.await.map_err(|error| match error {
        InitError::NoBulkhead | InitError::Version(_) => Failure::new(exit::USAGE, error.to_string()),
        InitError::Server(_) => Failure::unreachable(error),
    })?;
    printed?;
    if differs {
        output::to_stderr(
            "bulkhead-fleet: streams and consumers that differ from the configuration were not changed; correct the configuration, or change them with the nats command",
        );
    } else if settings.streams.replicas == 1 && !is_json {
        output::to_stderr(
            "bulkhead-fleet: with a single server, a power failure can lose acknowledged jobs unless the server sets `sync_interval: always`",
        );
    }
    Ok(if differs { exit::USAGE } else { exit::OK })
}

fn print(finding: &Finding, is_json: bool) -> Result<(), Failure> {
    let (state, name, differences) = match finding {
        Finding::Created(name) => ("created", name, &[][..]),
        Finding::Unchanged(name) => ("unchanged", name, &[][..]),
        Finding::Changed(name) => ("changed", name, &[][..]),
        Finding::Differs(name, differences) => ("differs", name, &differences[..]),
    };
    if is_json {
        return output::json(&json!({"state": state, "name": name, "differences": differences}));
    }
    output::line(&format!("{state:<10} {name}"))?;
    differences.iter().try_for_each(|difference| output::line(&format!("           {difference}")))
}
