//! `npuhal list`: what is here and what can be pulled.

use crate::Host;
use crate::args::ListArgs;
use crate::error::CliError;
use crate::terminal::{bytes_text, say};
use npuhal_models::store::{Presence, Stored, StoredKind};
use npuhal_models::{Catalogue, Store};
use serde_json::json;

pub(crate) fn list(host: &Host, args: &ListArgs) -> Result<(), CliError> {
    Ok(say(&text(host, args.json)?)?)
}

/// The list; also for the chat's `/models`.
pub(crate) fn text(host: &Host, as_json: bool) -> Result<String, CliError> {
    let catalogue = Catalogue::builtin();
    let store = Store::locate(host.global.models_dir.as_deref())?;
    let stored = store.list(catalogue)?;
    Ok(if as_json { json_text(catalogue, &store, &stored) } else { table(catalogue, &store, &stored) })
}

fn table(catalogue: &Catalogue, store: &Store, stored: &[Stored]) -> String {
    let mut rows = vec![["MODEL", "SIZE", "LICENCE", "STATE"].map(str::to_owned)];
    for entry in catalogue.entries() {
        let here: Vec<&Stored> = stored.iter().filter(|file| file.name == entry.name).collect();
        let state = if here.is_empty() {
            format!("not here; npuhal pull {}", entry.name)
        } else {
            here.iter().map(|file| state(&file.kind, file.len_bytes)).collect::<Vec<_>>().join(", ")
        };
        rows.push([entry.name.clone(), bytes_text(entry.size_bytes), entry.licence.id.clone(), state]);
    }
    for file in stored.iter().filter(|file| file.kind == StoredKind::Foreign) {
        rows.push([file.name.clone(), bytes_text(file.len_bytes), "?".to_owned(), "your own file".to_owned()]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (name, size, licence) = (width(0), width(1), width(2));
    let mut text = format!("models folder: {}\n", store.folder().display());
    for row in &rows {
        text.push_str(&format!("{:name$}  {:>size$}  {:licence$}  {}\n", row[0], row[1], row[2], row[3]));
    }
    text
}

fn json_text(catalogue: &Catalogue, store: &Store, stored: &[Stored]) -> String {
    let available: Vec<_> = catalogue
        .entries()
        .iter()
        .map(|entry| {
            json!({
                "name": entry.name,
                "file": entry.file,
                "size_bytes": entry.size_bytes,
                "sha256": entry.sha256.to_string(),
                "licence": entry.licence.id,
            })
        })
        .collect();
    let here: Vec<_> = stored
        .iter()
        .map(|file| {
            json!({
                "name": file.name,
                "path": file.path.to_string_lossy(),
                "size_bytes": file.len_bytes,
                "state": state(&file.kind, file.len_bytes),
            })
        })
        .collect();
    let document = json!({ "models_dir": store.folder().to_string_lossy(), "catalogue": available, "stored": here });
    format!("{document:#}\n")
}

fn state(kind: &StoredKind, len_bytes: u64) -> String {
    match kind {
        StoredKind::Catalogued(Presence::Verified) => "here, verified".to_owned(),
        StoredKind::Catalogued(Presence::WrongSize { found_bytes }) => {
            format!("damaged: {} here", bytes_text(*found_bytes))
        }
        StoredKind::Catalogued(_) => "here, not verified yet".to_owned(),
        StoredKind::Unfinished { size_bytes } => {
            format!("unfinished: {} of {}", bytes_text(len_bytes), bytes_text(*size_bytes))
        }
        _ => "your own file".to_owned(),
    }
}
