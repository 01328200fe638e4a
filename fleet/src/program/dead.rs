//! Implements `bulkhead-fleet dead`, which lists, shows, requeues and drops dead letters. A dead letter is a job whose
//! outcome is not `ok`. Agents write dead letters, and `operate` reads and changes the streams.

use bulkhead_api::JobOutcome;
use bulkhead_api::text::escape;
use bulkhead_fleet::operate::{DeadFilter, DeadLetter, OperateError, Operator, UnreadableLetter};
use bulkhead_fleet::settings::Settings;
use serde_json::{Value, json};

use super::args::{Dead, DeadCommand, Selection};
use super::output::{self, Failure, exit};
use super::status::print_table;

/// Runs the command.
pub(crate) async fn run(settings: &Settings, dead: &Dead, is_json: bool) -> Result<u8, Failure> {
    let operator = Operator::connect(settings).await.map_err(Failure::unreachable)?;
    let mut code = exit::OK;
    match &dead.command {
        DeadCommand::List { bulkhead, tenant, limit } => {
            let filter = DeadFilter { bulkhead: bulkhead.clone(), tenant: tenant.clone(), id: None };
            let letters = operator.dead(&filter, *limit).await.map_err(Failure::unreachable)?;
            list(&letters, is_json)?;
        }
        DeadCommand::Show { id, tenant, output } => {
            let letter = one(&operator, id, tenant.as_deref()).await?;
            match output {
                Some(_) if letter.dropped_payload_bytes.is_some() => {
                    let message = format!("the dead letter {id} was stored without the job's payload");
                    return Err(Failure::new(exit::NOT_FOUND, message));
                }
                Some(file) => output::payload(Some(file), &letter.payload)?,
                None => output::line(&format!("{:#}", letter_json(&letter)))?,
            }
        }
        DeadCommand::Requeue(selection) => {
            for subject in select(&operator, selection).await? {
                match requeue(&operator, &subject).await {
                    Ok(Some((id, new_id))) => report(is_json, "requeued", &id, Some(&new_id))
                        .or_else(Failure::unless_closed_pipe)?,
                    Ok(None) => {}
                    Err(error) => set_code(&mut code, error, is_json)?,
                }
            }
        }
        DeadCommand::Drop(selection) => {
            for subject in select(&operator, selection).await? {
                match operator.drop_letter(&subject).await {
                    Ok(Some(id)) => {
                        report(is_json, "dropped", &id, None).or_else(Failure::unless_closed_pipe)?
                    }
                    Ok(None) => {}
                    Err(error) => set_code(&mut code, error, is_json)?,
                }
            }
        }
    }
    Ok(code)
}

/// Requeues a dead letter. Returns the old and the new ID, or `None` if the letter has been removed.
async fn requeue(operator: &Operator, subject: &str) -> Result<Option<(String, String)>, OperateError> {
    let Some(letter) = operator.dead_letter(subject).await? else { return Ok(None) };
    let new_id = operator.requeue(&letter).await?;
    Ok(Some((letter.options.id, new_id)))
}

/// Prints an error that concerns only one dead letter, and keeps the exit code of the first such error. Returns all
/// other errors.
fn set_code(code: &mut u8, error: OperateError, is_json: bool) -> Result<(), Failure> {
    let failure = failure(error);
    if failure.code() == exit::UNREACHABLE {
        return Err(failure);
    }
    if is_json {
        // Ignores write errors, because the message is also written to standard error.
        let _ = output::json(&failure.json());
    }
    if *code == exit::OK {
        *code = failure.code();
    }
    failure.report();
    Ok(())
}

fn failure(error: OperateError) -> Failure {
    match error.reason() {
        Some(reason) => Failure::rejected(reason, error.to_string()),
        None => Failure::unreachable(error),
    }
}

async fn one(operator: &Operator, id: &str, tenant: Option<&str>) -> Result<DeadLetter, Failure> {
    let filter = DeadFilter { bulkhead: None, tenant: tenant.map(str::to_owned), id: Some(id.to_owned()) };
    let subjects = operator.dead_subjects(&filter).await.map_err(Failure::unreachable)?;
    let missing = || Failure::new(exit::NOT_FOUND, format!("there is no dead letter with the ID {id}"));
    match &subjects[..] {
        [] => Err(missing()),
        [subject] => read(operator, subject).await?.ok_or_else(missing),
        several => Err(Failure::new(
            exit::USAGE,
            format!("{} dead letters have the ID {id}: select a tenant with --tenant", several.len()),
        )),
    }
}

async fn read(operator: &Operator, subject: &str) -> Result<Option<DeadLetter>, Failure> {
    operator.dead_letter(subject).await.map_err(failure)
}

/// Returns the subjects of the selected dead letters.
async fn select(operator: &Operator, selection: &Selection) -> Result<Vec<String>, Failure> {
    let Selection { ids, all, bulkhead, tenant } = selection;
    let filter = |id: Option<String>| DeadFilter { bulkhead: bulkhead.clone(), tenant: tenant.clone(), id };
    if *all {
        return operator.dead_subjects(&filter(None)).await.map_err(Failure::unreachable);
    }
    let mut selected = Vec::new();
    for id in ids {
        let filter = filter(Some(id.clone()));
        let subjects = operator.dead_subjects(&filter).await.map_err(Failure::unreachable)?;
        if subjects.is_empty() {
            return Err(Failure::new(exit::NOT_FOUND, format!("there is no dead letter with the ID {id}")));
        }
        selected.extend(subjects);
    }
    Ok(selected)
}

fn list(letters: &[Result<DeadLetter, Box<UnreadableLetter>>], is_json: bool) -> Result<(), Failure> {
    if is_json {
        return letters.iter().try_for_each(|letter| {
            output::json(&letter.as_ref().map_or_else(|letter| unreadable_json(letter), letter_json))
        });
    }
    let rows = letters.iter().map(|letter| {
        let row = match letter {
            Ok(DeadLetter { at, options, outcome, .. }) => {
                [at, &options.bulkhead, &options.tenant, &options.id, &outcome.to_string()]
                    .map(|text| escape(text))
            }
            Err(letter) => {
                let UnreadableLetter { at, bulkhead, tenant, id, error, .. } = &**letter;
                [at, bulkhead, tenant, id, &format!("unreadable: {error}")].map(|text| escape(text))
            }
        };
        row.map(|text| text.replace('\n', "\\n")).to_vec()
    });
    print_table(&["TIME", "BULKHEAD", "TENANT", "ID", "OUTCOME"], rows)
}

fn letter_json(letter: &DeadLetter) -> Value {
    let options = &letter.options;
    let mut document = json!(JobOutcome::described(&letter.outcome));
    document["id"] = json!(options.id);
    document["tenant"] = json!(options.tenant);
    document["operation"] = json!(options.operation);
    document["idempotent"] = json!(options.is_idempotent);
    document["at"] = json!(letter.at);
    document["payload_bytes"] = json!(letter.payload.len());
    if let Some(bytes) = letter.dropped_payload_bytes {
        document["dropped_payload_bytes"] = json!(bytes);
    }
    document
}

fn unreadable_json(letter: &UnreadableLetter) -> Value {
    let UnreadableLetter { bulkhead, tenant, id, at, error, .. } = letter;
    json!({"bulkhead": bulkhead, "tenant": tenant, "id": id, "at": at, "error": error})
}

fn report(is_json: bool, done: &str, id: &str, new_id: Option<&str>) -> Result<(), Failure> {
    if is_json {
        return output::json(&json!({"done": done, "id": id, "new_id": new_id}));
    }
    let suffix = new_id.map_or_else(String::new, |new| format!(" as {}", escape(new)));
    output::line(&format!("{done} {}{suffix}", escape(id)))
}
