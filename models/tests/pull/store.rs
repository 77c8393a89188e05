//! The models folder.

use crate::fixture::{Fixture, content, sha256};
use npuhal_core::stage::Control;
use npuhal_models::Catalogue;
use npuhal_models::store::{Located, Presence, Store, StoreError, StoredKind};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// A catalogue with one model, `small`, whose file is the test content.
fn catalogue() -> Catalogue {
    let content = content();
    let (size, sum) = (content.len(), sha256(&content));
    Catalogue::parse(&format!(
        r#"{{"default": "small", "models": [{{"name": "small", "aliases": ["s"], "display_name": "Small",
            "file": "Small.gguf", "size_bytes": {size}, "sha256": "{sum}",
            "licence": {{"id": "MIT", "url": "https://hub.test"}},
            "sources": [{{"kind": "hub", "repository": "a/b", "revision": "{}", "file": "Small.gguf"}}]}}]}}"#,
        "0".repeat(40)
    ))
    .unwrap()
}

fn setup() -> (TempDir, Store, Catalogue) {
    let folder = TempDir::new().unwrap();
    let store = Store::new(folder.path());
    (folder, store, catalogue())
}

#[test]
fn files_are_listed_with_what_is_known_about_them() {
    let (folder, store, catalogue) = setup();
    let entry = catalogue.default_entry();
    assert_eq!(Store::new(folder.path().join("absent")).list(&catalogue).unwrap(), []);
    fs::write(folder.path().join("Small.gguf.part"), "GG").unwrap();
    fs::write(folder.path().join("other.GGUF"), "GGUF").unwrap();
    fs::write(folder.path().join(".hidden.gguf"), "").unwrap();
    fs::write(folder.path().join("notes.txt"), "").unwrap();
    fs::create_dir(folder.path().join("folder.gguf")).unwrap();
    symlink("nowhere", folder.path().join("dangling.gguf")).unwrap();
    let kinds =
        || store.list(&catalogue).unwrap().into_iter().map(|s| (s.name, s.len_bytes, s.kind)).collect::<Vec<_>>();
    let foreign = ("other.GGUF".to_owned(), 4, StoredKind::Foreign);
    let unfinished = StoredKind::Unfinished { size_bytes: 300_000 };
    assert_eq!(kinds(), [foreign.clone(), ("small".to_owned(), 2, unfinished)]);

    fs::remove_file(folder.path().join("Small.gguf.part")).unwrap();
    let is = |presence| assert_eq!(kinds()[1].2, StoredKind::Catalogued(presence));
    fs::write(store.path_of(entry), "GGUF").unwrap();
    is(Presence::WrongSize { found_bytes: 4 });
    fs::write(store.path_of(entry), content()).unwrap();
    is(Presence::Unverified);
    store.verify(entry, &Control::new(), &mut |_| {}).unwrap();
    is(Presence::Verified);
    // Another file under the same name, with the same size and time.
    let modified = fs::metadata(store.path_of(entry)).unwrap().modified().unwrap();
    let other = folder.path().join("other");
    fs::write(&other, content()).unwrap();
    fs::File::options().write(true).open(&other).unwrap().set_modified(modified).unwrap();
    fs::rename(&other, store.path_of(entry)).unwrap();
    is(Presence::Unverified);
    store.verify(entry, &Control::new(), &mut |_| {}).unwrap();
    // The same file, written again.
    fs::write(store.path_of(entry), vec![0; 300_000]).unwrap();
    is(Presence::Unverified);
}

#[test]
fn verification_reads_the_file_and_remembers_the_result() {
    let (_folder, store, catalogue) = setup();
    let entry = catalogue.default_entry();
    let verify = || store.verify(entry, &Control::new(), &mut |_| {});
    assert!(matches!(verify(), Err(StoreError::NotStored { .. })));
    fs::write(store.path_of(entry), "GGUF").unwrap();
    assert!(matches!(verify(), Err(StoreError::WrongSize { wanted_bytes: 300_000, found_bytes: 4, .. })));
    fs::write(store.path_of(entry), vec![0; 300_000]).unwrap();
    let error = verify().unwrap_err();
    assert!(matches!(error, StoreError::WrongChecksum { .. }));
    assert!(error.to_string().contains("npuhal pull small"), "{error}");
    fs::write(store.path_of(entry), content()).unwrap();
    let mut read = 0;
    store.verify(entry, &Control::new(), &mut |bytes| read = bytes).unwrap();
    assert_eq!((read, store.presence(entry)), (300_000, Presence::Verified));
    let stopped = Control::new();
    stopped.cancel();
    assert!(matches!(store.verify(entry, &stopped, &mut |_| {}), Err(StoreError::Stopped(_))));
    // A damaged record costs a checksum, nothing else.
    fs::write(store.folder().join(".verified/Small.gguf.json"), "{").unwrap();
    assert_eq!(store.presence(entry), Presence::Unverified);
}

#[test]
fn removal_takes_a_model_and_its_records_and_nothing_else() {
    let (folder, store, catalogue) = setup();
    let entry = catalogue.default_entry();
    fs::write(store.path_of(entry), content()).unwrap();
    fs::write(store.part_path_of(entry), "GG").unwrap();
    fs::write(folder.path().join("other.gguf"), "GGUF").unwrap();
    store.verify(entry, &Control::new(), &mut |_| {}).unwrap();
    assert_eq!(store.remove(&catalogue, "S").unwrap(), 300_002);
    assert_eq!(fs::read_dir(store.folder().join(".verified")).unwrap().count(), 0);
    assert!(matches!(store.remove(&catalogue, "small"), Err(StoreError::NotStored { .. })));
    assert_eq!(store.remove(&catalogue, "other").unwrap(), 4);

    let outside = TempDir::new().unwrap();
    let precious = outside.path().join("precious.gguf");
    fs::write(&precious, "GGUF").unwrap();
    symlink(&precious, folder.path().join("link.gguf")).unwrap();
    store.remove(&catalogue, "link.gguf").unwrap();
    let relative = format!("../{}/precious.gguf", outside.path().file_name().unwrap().to_str().unwrap());
    for name in [precious.to_str().unwrap(), &relative, "", ".", "..", ".verified", "notes.txt"] {
        assert!(matches!(store.remove(&catalogue, name), Err(StoreError::UnknownModel { .. })), "{name}");
    }
    assert!(precious.exists());
}

#[test]
fn a_model_that_is_being_fetched_is_not_removed() {
    use crate::fixture::Watcher;
    use crate::server::{Reply, Server};
    let server = Server::start(|_, _| Reply::whole(&content()).stall_after(1000));
    let fixture = Fixture::hub(&server.url());
    let (control, catalogue) = (Control::new(), catalogue_of(&fixture));
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| {
            let mut watcher = Watcher { control: control.clone(), ..Watcher::default() };
            fixture.pull_with(&mut watcher)
        });
        while fixture.part_len() != Some(1000) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(matches!(fixture.store.remove(&catalogue, "m"), Err(StoreError::Busy { .. })));
        control.cancel();
        pull.join().unwrap().unwrap_err();
    });
    assert_eq!(fixture.store.remove(&catalogue, "m").unwrap(), 1000);
}

fn catalogue_of(fixture: &Fixture) -> Catalogue {
    let entry = &fixture.entry;
    Catalogue::parse(&format!(
        r#"{{"default": "m", "models": [{{"name": "m", "aliases": [], "display_name": "M", "file": "m.gguf",
            "size_bytes": {}, "sha256": "{}", "licence": {{"id": "MIT", "url": "https://hub.test"}},
            "sources": [{{"kind": "hub", "repository": "a/b", "revision": "{}", "file": "m.gguf"}}]}}]}}"#,
        entry.size_bytes,
        entry.sha256,
        "0".repeat(40)
    ))
    .unwrap()
}

#[test]
fn names_lead_to_the_catalogue_and_paths_to_files() {
    let (folder, store, catalogue) = setup();
    let resolve = |spec: &str| store.resolve(&catalogue, spec);
    let entry = catalogue.default_entry();
    for name in ["small", "S", "Small.gguf"] {
        assert_eq!(resolve(name).unwrap(), Located::Catalogued(entry), "{name}");
    }
    let mine = folder.path().join("mine.gguf");
    fs::write(&mine, "GGUF").unwrap();
    for spec in ["mine", "mine.gguf", mine.to_str().unwrap()] {
        assert_eq!(resolve(spec).unwrap(), Located::File(mine.clone()), "{spec}");
    }
    assert!(matches!(resolve(folder.path().to_str().unwrap()), Err(StoreError::NotAFile { found: "a folder", .. })));
    assert!(matches!(resolve("./absent"), Err(StoreError::NoSuchFile { .. })));
    assert!(matches!(resolve("absent.gguf"), Err(StoreError::NoSuchFile { .. })));
    let odd = folder.path().join(OsStr::from_bytes(b"odd\xff.gguf"));
    assert!(matches!(store.resolve(&catalogue, &odd), Err(StoreError::NoSuchFile { .. })));
    fs::write(&odd, "GGUF").unwrap();
    assert_eq!(store.resolve(&catalogue, &odd).unwrap(), Located::File(odd));
    let error = resolve("smal").unwrap_err().to_string();
    for expected in ["no model `smal`", "did you mean `small`?", "known: small, mine.gguf"] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let error = resolve("something-else").unwrap_err().to_string();
    assert!(!error.contains("did you mean") && error.contains("known: small"), "{error}");
}
