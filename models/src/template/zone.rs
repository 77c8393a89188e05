//! The system's time zone: how far local time is from UTC at a moment.
//!
//! Read from where C's `localtime` reads it: `TZ`, else `/etc/localtime`, in the format of RFC 9636 with its rule of POSIX
//! for the time behind the last transition. Whatever cannot be read counts as UTC, as it does there.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Largest zone file; those of the database have at most a few kilobytes.
const MAX_FILE_BYTES: u64 = 256 << 10;
const DAY: i64 = 86_400;

/// Local time at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Offset {
    /// Seconds east of UTC.
    pub(super) seconds: i64,
    /// The abbreviation.
    pub(super) name: String,
}

impl Offset {
    pub(super) fn utc() -> Self {
        Self { seconds: 0, name: "UTC".to_owned() }
    }

    /// The system's, at `unix` seconds.
    pub(super) fn local(unix: i64) -> Self {
        let name = std::env::var("TZ").ok();
        let found = match name.as_deref().map(|name| name.strip_prefix(':').unwrap_or(name)) {
            None => of_file(Path::new("/etc/localtime"), unix),
            Some(name) => named(name).and_then(|path| of_file(&path, unix)).or_else(|| Posix::parse(name)?.at(unix)),
        };
        found.unwrap_or_else(Self::utc)
    }
}

/// The file of a zone's name.
fn named(name: &str) -> Option<PathBuf> {
    let is_plain = !name.is_empty() && !name.split('/').any(|part| part == "..");
    is_plain.then(|| Path::new("/usr/share/zoneinfo").join(name))
}

fn of_file(path: &Path, unix: i64) -> Option<Offset> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    in_data(&bytes, unix)
}

/// What a zone file says of the moment `unix`.
fn in_data(bytes: &[u8], unix: i64) -> Option<Offset> {
    // Version 1 has times of four bytes; later ones repeat everything with eight.
    let first = Block::new(bytes, 4)?;
    if first.version == 0 {
        return first.at(unix);
    }
    let rest = bytes.get(first.len_bytes..)?;
    let second = Block::new(rest, 8)?;
    let footer = rest.get(second.len_bytes..).and_then(|rest| std::str::from_utf8(rest).ok());
    let rule = footer.and_then(|text| Posix::parse(text.trim_matches('\n')));
    match (second.is_behind(unix), rule) {
        (true, Some(rule)) => rule.at(unix),
        _ => second.at(unix),
    }
}

/// Transitions of a zone file.
struct Block<'b> {
    version: u8,
    times: &'b [u8],
    time_bytes: usize,
    indices: &'b [u8],
    types: &'b [u8],
    names: &'b [u8],
    len_bytes: usize,
}

impl<'b> Block<'b> {
    fn new(bytes: &'b [u8], time_bytes: usize) -> Option<Self> {
        if bytes.get(..4)? != b"TZif" {
            return None;
        }
        let count = |n: usize| {
            let field = bytes.get(20 + 4 * n..24 + 4 * n)?;
            Some(u32::from_be_bytes(field.try_into().ok()?) as usize)
        };
        let (utc, standard, leaps, times, types, chars) =
            (count(0)?, count(1)?, count(2)?, count(3)?, count(4)?, count(5)?);
        let mut at = 44usize;
        let mut take = |count: usize, size: usize| {
            let end = at.checked_add(count.checked_mul(size)?)?;
            let part = bytes.get(at..end)?;
            at = end;
            Some(part)
        };
        let (time_part, indices) = (take(times, time_bytes)?, take(times, 1)?);
        let (type_part, names) = (take(types, 6)?, take(chars, 1)?);
        take(leaps, time_bytes + 4)?;
        take(standard, 1)?;
        take(utc, 1)?;
        let version = *bytes.get(4)?;
        Some(Self { version, times: time_part, time_bytes, indices, types: type_part, names, len_bytes: at })
    }

    fn time(&self, n: usize) -> Option<i64> {
        let field = self.times.get(n * self.time_bytes..(n + 1) * self.time_bytes)?;
        match self.time_bytes {
            4 => Some(i64::from(i32::from_be_bytes(field.try_into().ok()?))),
            _ => Some(i64::from_be_bytes(field.try_into().ok()?)),
        }
    }

    /// Whether `unix` is not before the last transition.
    fn is_behind(&self, unix: i64) -> bool {
        self.indices.len().checked_sub(1).is_none_or(|last| self.time(last).is_some_and(|time| time <= unix))
    }

    fn at(&self, unix: i64) -> Option<Offset> {
        let past = (0..self.indices.len()).take_while(|n| self.time(*n).is_some_and(|time| time <= unix)).count();
        let index = if past == 0 { 0 } else { usize::from(self.indices[past - 1]) };
        let entry = self.types.get(index * 6..index * 6 + 6)?;
        let name = self.names.get(usize::from(entry[5])..)?;
        let name = name.split(|byte| *byte == 0).next()?;
        Some(Offset {
            seconds: i64::from(i32::from_be_bytes(entry[..4].try_into().ok()?)),
            name: String::from_utf8_lossy(name).into_owned(),
        })
    }
}

/// A rule of POSIX: `CET-1CEST,M3.5.0,M10.5.0/3`.
#[derive(Debug)]
struct Posix {
    standard: Offset,
    /// Summer time, its start and its end.
    summer: Option<(Offset, Change, Change)>,
}

/// A change in the year.
#[derive(Debug)]
struct Change {
    day: Day,
    /// Seconds of local time.
    time: i64,
}

#[derive(Debug)]
enum Day {
    /// From 1, without 29 February.
    Julian(i64),
    /// From 0, with it.
    OfYear(i64),
    /// Month from 1, week from 1 (5 is the last), day of the week from Sunday.
    OfMonth(i64, i64, i64),
}

impl Posix {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(',');
        let (name, rest) = zone_name(parts.next()?)?;
        let (west, rest) = clock_time(rest)?;
        let standard = Offset { seconds: -west, name };
        if rest.is_empty() {
            return Some(Self { standard, summer: None });
        }
        let (name, rest) = zone_name(rest)?;
        let seconds = if rest.is_empty() { standard.seconds + 3600 } else { -clock_time(rest)?.0 };
        let (start, end) = (Change::parse(parts.next()?)?, Change::parse(parts.next()?)?);
        Some(Self { standard, summer: Some((Offset { seconds, name }, start, end)) })
    }

    fn at(&self, unix: i64) -> Option<Offset> {
        let Some((summer, start, end)) = &self.summer else { return Some(self.standard.clone()) };
        let year = year_of(unix.checked_add(self.standard.seconds)?.div_euclid(DAY));
        let start = start.in_year(year) - self.standard.seconds;
        let end = end.in_year(year) - summer.seconds;
        let is_summer = if start < end { (start..end).contains(&unix) } else { !(end..start).contains(&unix) };
        Some(if is_summer { summer.clone() } else { self.standard.clone() })
    }
}

impl Change {
    fn parse(text: &str) -> Option<Self> {
        let (day, time) = match text.split_once('/') {
            Some((day, time)) => (day, clock_time(time).filter(|(_, rest)| rest.is_empty())?.0),
            None => (text, 2 * 3600),
        };
        let number = |text: &str| text.parse::<i64>().ok().filter(|n| (0..=365).contains(n));
        let day = if let Some(date) = day.strip_prefix('M') {
            let mut fields = date.splitn(3, '.').map(number);
            let (month, week, weekday) = (fields.next()??, fields.next()??, fields.next()??);
            let is_valid = (1..=12).contains(&month) && (1..=5).contains(&week) && weekday < 7;
            is_valid.then_some(Day::OfMonth(month, week, weekday))?
        } else if let Some(day) = day.strip_prefix('J') {
            Day::Julian(number(day).filter(|day| *day > 0)?)
        } else {
            Day::OfYear(number(day)?)
        };
        Some(Self { day, time })
    }

    /// Local time of the change in `year`, in seconds.
    fn in_year(&self, year: i64) -> i64 {
        let day = match self.day {
            Day::OfYear(day) => days_to(year, 1) + day,
            Day::Julian(day) => {
                days_to(year, 1) + day - 1 + i64::from(day >= 60 && days_to(year, 3) - days_to(year, 1) == 60)
            }
            Day::OfMonth(month, week, weekday) => {
                let first = days_to(year, month);
                let next = if month == 12 { days_to(year + 1, 1) } else { days_to(year, month + 1) };
                // 1 January 1970 was a Thursday.
                let day = first + (weekday - (first + 4)).rem_euclid(7) + 7 * (week - 1);
                if day < next { day } else { day - 7 }
            }
        };
        day * DAY + self.time
    }
}

/// A name of letters, or anything in angle brackets.
fn zone_name(text: &str) -> Option<(String, &str)> {
    if let Some(rest) = text.strip_prefix('<') {
        return rest.split_once('>').map(|(name, rest)| (name.to_owned(), rest));
    }
    let len = text.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(text.len());
    (len >= 3).then(|| (text[..len].to_owned(), &text[len..]))
}

/// `[+-]h[h][:mm[:ss]]`, in seconds, and what follows.
fn clock_time(text: &str) -> Option<(i64, &str)> {
    let (sign, text) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let len = text.find(|c: char| !c.is_ascii_digit() && c != ':').unwrap_or(text.len());
    let mut seconds = 0;
    for (field, unit) in text[..len].splitn(3, ':').zip([3600, 60, 1]) {
        seconds += field.parse::<i64>().ok().filter(|n| (0..=167).contains(n))? * unit;
    }
    Some((sign * seconds, &text[len..]))
}

/// Days from 1970 to the first of `month`, from 1.
fn days_to(year: i64, month: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// The year of a day since 1970.
fn year_of(day: i64) -> i64 {
    let estimate = 1970 + day.div_euclid(366);
    (estimate..).find(|year| days_to(year + 1, 1) > day).unwrap_or(estimate)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rule: &str, unix: i64) -> (i64, String) {
        let Offset { seconds, name } = Posix::parse(rule).unwrap().at(unix).unwrap();
        (seconds, name)
    }

    /// Wanted values are those of Python's `zoneinfo`.
    #[test]
    fn rules_change_when_they_say() {
        let berlin = "CET-1CEST,M3.5.0,M10.5.0/3";
        assert_eq!(at(berlin, 1_711_846_799), (3600, "CET".into()));
        assert_eq!(at(berlin, 1_711_846_800), (7200, "CEST".into()));
        assert_eq!(at(berlin, 1_729_990_799), (7200, "CEST".into()));
        assert_eq!(at(berlin, 1_729_990_800), (3600, "CET".into()));
        let sydney = "AEST-10AEDT,M10.1.0,M4.1.0/3";
        assert_eq!(at(sydney, 1_704_067_200), (39_600, "AEDT".into()));
        assert_eq!(at(sydney, 1_719_792_000), (36_000, "AEST".into()));
        assert_eq!(at("<+0545>-5:45", 0), (20_700, "+0545".into()));
        assert_eq!(at("EST5EDT,M3.2.0,M11.1.0", 1_720_000_000), (-14_400, "EDT".into()));
        assert_eq!(at("AAA0BBB,J60,J300", 1_709_251_200 + 7200), (3600, "BBB".into()));
    }

    #[test]
    fn what_is_no_zone_is_none() {
        for text in ["", "X", "CET", "CET-1CEST", "CET-1CEST,M13.1.0,M1.1.0", "CET-999", "CET-1CEST,M3.5.0"] {
            assert!(Posix::parse(text).is_none(), "{text}");
        }
        for bytes in [&b""[..], b"TZif", b"TZif2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"] {
            assert_eq!(in_data(bytes, 0), None);
        }
        assert_eq!(named("../etc/passwd"), None);
    }

    #[test]
    fn files_are_read() {
        let block = |time: &[&[u8]]| {
            let mut bytes = b"TZif2".to_vec();
            bytes.resize(20, 0);
            for count in [0u32, 0, 0, time.len() as u32, 2, 8] {
                bytes.extend(count.to_be_bytes());
            }
            time.iter().for_each(|time| bytes.extend(*time));
            bytes.extend(vec![1; time.len()]);
            bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x0e, 0x10, 0, 4]);
            bytes.extend(b"LMT\0CET\0");
            bytes
        };
        let mut file = block(&[&100i32.to_be_bytes()]);
        file.extend(block(&[&100i64.to_be_bytes()]));
        assert_eq!(in_data(&file, 99), Some(Offset { seconds: 0, name: "LMT".into() }));
        assert_eq!(in_data(&file, 100), Some(Offset { seconds: 3600, name: "CET".into() }));
        file.extend(b"\nXYZ-2\n");
        assert_eq!(in_data(&file, 100), Some(Offset { seconds: 7200, name: "XYZ".into() }));
        assert_eq!(in_data(&file, 99), Some(Offset { seconds: 0, name: "LMT".into() }));
    }
}
