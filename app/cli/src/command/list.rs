//! `npuhal list`: what is here and what can be pulled.

use crate::Host;
use crate::args::ListArgs;
use crate::error::CliError;
use crate::terminal::{bytes_text, say};
use npuhal_models::package::{Scan, scan};
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
    let packages = scan(store.folder())?;
    Ok(if as_json {
        json_text(catalogue, &store, &stored, &packages)
    } else {
        table(catalogue, &store, &stored) + &packages_text(&packages)
    })
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

/// The xdna1 packages of the folder, and what was passed over; empty where there is neither.
fn packages_text(scan: &Scan) -> String {
    let mut text = String::new();
    if !scan.packages.is_empty() {
        text.push_str("xdna1 packages:\n");
    }
    let width = scan.packages.iter().map(|package| package.model_id.chars().count()).max().unwrap_or(0);
    for package in &scan.packages {
        let (id, name, path) = (&package.model_id, &package.display_name, package.path.display());
        text.push_str(&format!("{id:width$}  {name}, {} positions, {path}\n", package.context_length));
    }
    for (id, paths) in scan.duplicates() {
        let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        text.push_str(&format!("{id}: several packages have this id: {}\n", paths.join(", ")));
    }
    for skipped in &scan.skipped {
        text.push_str(&format!("{}: passed over: {}\n", skipped.path.display(), skipped.reason));
    }
    text
}

fn json_text(catalogue: &Catalogue, store: &Store, stored: &[Stored], scan: &Scan) -> String {
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
    let packages: Vec<_> = scan
        .packages
        .iter()
        .map(|package| {
            json!({
                "model_id": package.model_id,
                "display_name": package.display_name,
                "family": package.family,
                "path": package.path.to_string_lossy(),
                "context_length": package.context_length,
            })
        })
        .collect();
    let skipped: Vec<_> = scan
        .skipped
        .iter()
        .map(|skipped| json!({ "path": skipped.path.to_string_lossy(), "reason": skipped.reason }))
        .collect();
    let document = json!({
        "models_dir": store.folder().to_string_lossy(),
        "catalogue": available,
        "stored": here,
        "packages": packages,
        "packages_passed_over": skipped,
    });
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
