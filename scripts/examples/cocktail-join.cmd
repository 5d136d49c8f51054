@echo off
rem What cocktail-join-task.xml runs: join, and join again where cocktail ends with 75 (connection lost).
:again
cocktail join @"%USERPROFILE%\cocktail-url.txt" --yes --progress plain --wait 10m --hours 22:00-07:00 --max-up 5mbit >> "%USERPROFILE%\cocktail-join.log" 2>&1
if not %ERRORLEVEL%==75 exit /b %ERRORLEVEL%
ping -n 61 127.0.0.1 > nul
goto again
